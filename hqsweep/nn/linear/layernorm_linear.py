"""LayerNormLinear: a norm, whose output is quantized as the input of the linear that follows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.options import LayerNormLinearOptions
from hqsweep.nn.core.recipe_argument import RecipeArgument, whole_recipe
from hqsweep.nn.core.residual import AddsBranch, Branch
from hqsweep.nn.layers.norm import Norm
from hqsweep.nn.linear.linear import Linear
from hqsweep.nn.linear.linear_call import LinearCall
from hqsweep.parallel.overlap.deferred_reduce import LeftGradient
from hqsweep.parallel.overlap.overlapped_gemm import start_values
from hqsweep.parallel.overlap.prefetch import early_operand


class LayerNormLinear(AddsBranch, Linear):
    """y [..., N] = norm(x [..., K]) @ weight [N, K].T (+ bias [N]); the roles are those of a linear.

    The norm is named `name`.norm; see Norm, and Linear for the rest.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: LayerNormLinearOptions = LayerNormLinearOptions(),
    ) -> None:
        recipe = whole_recipe(recipe, name)
        super().__init__(in_features, out_features, name=name, recipe=recipe, bias=bias, dtype=dtype, options=options)
        norm = {"normalization": options.normalization, "epsilon": options.epsilon}
        self.norm = Norm(in_features, name=f"{name}.norm", recipe=recipe, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return self._added(x, None)[1]

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        total, h, known = self.normed(x, branch)
        return total, self._product(h, known)

    def normed(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """norm.added(x, branch, dtype), and what is known of its output, as fields of a LinearCall. Where the input is
        quantized as it is computed, that is the description that it is computed from, and the output has no values;
        where the norm's kernel finds the amaxes that the quantizer takes, it is these."""
        parts = self.parallel is not None and self.parallel.sequence is not None  # of h, which is quantized whole
        if torch.compiler.is_compiling() or not (parts or use_kernels(x)):
            return *self.norm.added(x, branch, self.dtype), {}
        if parts:
            return self._normed_part(x, branch)
        saves_column = torch.is_grad_enabled() and self.weight.requires_grad and not self.save_original_input
        quantizer, outputs = self.active_quantizers().input, ("codes", "codes" if saves_column else None)
        if not (current().probe or self.save_original_input) and quantizer.takes_normed(*outputs):
            described = self.norm.described(x, branch, self.dtype)
            if described is not None:
                return *described[:2], {"normed": [described[2]]}
        total, h, *amaxes = self.norm.measured(x, branch, self.dtype, *quantizer.takes_amaxes(*outputs))
        return total, h, {"input_amaxes": amaxes}

    def _normed_part(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """normed(), of this rank's tokens of h."""
        facts, exchange, weight = self.linear_facts(), self.exchange(x.shape[:-1]), self.own(self.weight)
        call = LinearCall(**facts, exchange=exchange, early=early_operand(self))
        call.make_early([weight], "rowwise")  # before the branch's sum over ranks is waited for
        part = call.exchange.tokens("input", x.shape[:-1].numel())
        gradient = LeftGradient(self.name, partial(start_values, call.quantizers.input, part, len(weight)))
        gradient.before_norm(weight)
        added = self.norm.added(x, branch, self.dtype, gradient)
        known = {"gradient": gradient, "sent": gradient.sent} if gradient.is_taken else {}
        return *added, {"early": call.early} | known
