"""QuantizedWeight: base of modules whose weight is not a GEMM operand, such as embedding tables and norms."""

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.nn.core.context import autocast_recipe, current
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.nn.core.rounding import rounded
from hqsweep.nn.core.wire import WeightRanks
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import WeightQuantizers


class QuantizedWeight(QuantizedModule):
    """A module whose single weight is rounded to the quantizer's rowwise format."""

    quantizers: WeightQuantizers
    parallel: WeightRanks | None = None
    """How ranks share the parameters; None: this rank has all of them."""

    def own(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, as forward reads it."""
        return parameter if self.parallel is None else self.parallel.own(parameter)

    def quantized_weight(self) -> Tensor:
        """Return self.weight, or this rank's part of it, rounded by rounded()."""
        quantizers, context = self.active_quantizers(), current()
        quantizer = quantizers.weight
        self.check_scope(quantizers, autocast_recipe(), context)
        if quantizer.stochastic:
            self.claim_bits(context)
        call = {"step": context.step, "record": torch.is_grad_enabled(), "group": context.amax_group}
        states = self.states.of("weight", quantizer, device=self.weight.device, **call)
        weight, key = self.own(self.weight), context.key(_slot(self.module_type, self.name))
        part = None if self.parallel is None else self.parallel.part
        return rounded(weight, quantizer, key, states, part)


@memo
def _slot(module_type: str, name: str) -> str:
    """Return the slot of the weight's random bits."""
    return str(QuantizerRole(module_type, "weight", name))
