"""QuantizedWeight: base of the modules whose weight is no GEMM operand, embedding tables and norms."""

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.nn.context import autocast_recipe, current
from hqsweep.nn.module import QuantizedModule
from hqsweep.nn.rounding import rounded
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import WeightQuantizers


class QuantizedWeight(QuantizedModule):
    """A module with one weight that is read in the values of its quantizer's rowwise format."""

    quantizers: WeightQuantizers

    def quantized_weight(self) -> Tensor:
        """self.weight, rounded as `rounded` does."""
        quantizer, context = self.active_quantizers().weight, current()
        self.check_scope(autocast_recipe(), context)
        if quantizer.stochastic:
            self.claim_bits(context)
        call = {"step": context.step, "record": torch.is_grad_enabled(), "group": context.amax_group}
        states = self.states.of("weight", quantizer, device=self.weight.device, **call)
        return rounded(self.weight, quantizer, context.key(_slot(self.module_type, self.name)), states)


@memo
def _slot(module_type: str, name: str) -> str:
    """The slot of the weight's random bits."""
    return str(QuantizerRole(module_type, "weight", name))
