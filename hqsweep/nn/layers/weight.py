"""QuantizedWeight: base of the modules whose weight is no GEMM operand, embedding tables and norms."""

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
    """A module with one weight that is read in the values of its quantizer's rowwise format."""

    quantizers: WeightQuantizers
    part: Part | None = None
    """This rank's part, where ranks share the weight; None: each has all of it."""
    tokens_group: Any = None
    """The ranks that each have some of the tokens, over which the gradients of parameters are summed."""

    def own(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, as forward reads it."""
        if self.tokens_group is None:
            return local(parameter)
        together = summed_together(parameter)
        return sum_gradients([local(parameter)], self.tokens_group)[0] if together is None else together

    def quantized_weight(self) -> Tensor:
        """self.weight, or this rank's part of it, rounded as `rounded` does."""
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
    """The slot of the weight's random bits."""
    return str(QuantizerRole(module_type, "weight", name))
