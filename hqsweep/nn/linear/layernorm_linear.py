"""LayerNormLinear: a norm, whose output is quantized as the input of the linear that follows."""

import torch
from torch import Tensor

from hqsweep.nn.core.call import (
    NOTHING,
    KnownInput,
)
from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.options import LayerNormLinearOptions
from hqsweep.nn.core.residual import AddsBranch, Branch
from hqsweep.nn.layers.norm import Norm
from hqsweep.nn.linear.linear import Linear
from hqsweep.recipe.argument import RecipeArgument, whole_recipe


class LayerNormLinear(AddsBranch, Linear):
    """y [..., N] = norm(x [..., K]) @ weight [N, K].T (+ bias [N]), with the roles of a Linear.

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

    def normed(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, KnownInput]:
        """Return norm.added(x, branch, dtype), and the KnownInput of the norm's output.

        KnownInput has the norm's input if the kernel quantizes while it computes; the output then has no values. It has
        the amaxes that the quantizer takes, if the norm's kernel finds them.
        """
        splits_tokens = self.parallel is not None and self.parallel.sequence is not None
        if splits_tokens and not torch.compiler.is_compiling():  # of the output, which is quantized whole
            return self.parallel.normed(self, x, branch)
        return normed_for(self, self.norm, x, branch)


def normed_for(linear: Linear, norm: Norm, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, KnownInput]:
    """Return norm.added(x, branch, dtype) for a linear that reads it, and the KnownInput of LayerNormLinear.normed."""
    if torch.compiler.is_compiling() or not use_kernels(x):
        return *norm.added(x, branch, linear.dtype), NOTHING
    saves_column = torch.is_grad_enabled() and linear.weight.requires_grad and not linear.save_original_input
    quantizer, outputs = linear.active_quantizers().input, ("codes", "codes" if saves_column else None)
    if not (current().probe or linear.save_original_input) and quantizer.takes_normed(*outputs):
        described = norm.described(x, branch, linear.dtype)
        if described is not None:
            return *described[:2], KnownInput(normed=described[2])
    total, h, *amaxes = norm.measured(x, branch, linear.dtype, *quantizer.takes_amaxes(*outputs))
    return total, h, KnownInput(amaxes=amaxes)
