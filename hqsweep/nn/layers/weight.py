"""QuantizedWeight: base of modules whose weight is not a GEMM operand, such as embedding tables and norms."""

from typing import Any

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.nn.core.context import autocast_recipe, current
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.nn.core.rounding import rounded
from hqsweep.parallel.overlap.shared_linear import local, sum_gradients
from hqsweep.parallel.overlap.summed_gains import summed_together
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import WeightQuantizers


class QuantizedWeight(QuantizedModule):
    """A module whose single weight is rounded to the quantizer's rowwise format."""

    quantizers: WeightQuantizers
    part: Part | None = None
    """This rank's part of a shared weight; None: every rank has the whole."""
    tokens_group: Any = None
    """The ranks that share the tokens; parameter gradients are summed over them."""

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, for forward."""
        if self.tokens_group is None:
            return local(parameter)
        together = summed_together(parameter)
        return sum_gradients([local(parameter)], self.tokens_group)[0] if together is None else together

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
        return rounded(weight, quantizer, key, states, self.part)


@memo
def _slot(module_type: str, name: str) -> str:
    """Return the slot of the weight's random bits."""
    return str(QuantizerRole(module_type, "weight", name))
