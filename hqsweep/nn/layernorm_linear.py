"""LayerNormLinear: a norm, whose output is quantized as the input of the linear that follows."""

import torch
from torch import Tensor

from hqsweep.nn.context import use_kernels
from hqsweep.nn.linear import Linear
from hqsweep.nn.norm import Norm
from hqsweep.nn.options import LayerNormLinearOptions
from hqsweep.nn.recipe_argument import RecipeArgument, whole_recipe
from hqsweep.nn.residual import AddsBranch


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

    def _added(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        total, h, *amaxes = self.normed(x, branch)
        return total, self._product(h, amaxes)

    def normed(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, ...]:
        """norm.added(x, branch, dtype), and what is known of the norm beforehand: the amaxes that the quantizer of the
        input takes, where the norm's kernel finds them."""
        if not use_kernels(x) or torch.compiler.is_compiling():
            return self.norm.added(x, branch, self.dtype)
        kept = torch.is_grad_enabled() and self.weight.requires_grad and not self.save_original_input
        wanted = self.active_quantizers().input.takes_amaxes("codes", "codes" if kept else None)
        return self.norm.measured(x, branch, self.dtype, *wanted)
