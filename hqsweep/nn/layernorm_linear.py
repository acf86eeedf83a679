"""LayerNormLinear: a norm, whose output is quantized as the input of the linear that follows."""

from typing import Any

from torch import Tensor

from hqsweep.nn.linear import Linear
from hqsweep.nn.module import gemm_options
from hqsweep.nn.norm import EPSILON, Norm
from hqsweep.recipe.schedule import AnyRecipe


class LayerNormLinear(Linear):
    """y [..., N] = norm(x [..., K]) @ weight [N, K].T (+ bias [N]); the roles are those of a linear.

    The norm is named `name`.norm; see Norm, and Linear for the other options.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        recipe: AnyRecipe,
        normalization: str = "RMSNorm",
        epsilon: float = EPSILON,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **gemm_options(recipe, self.module_type, name), **options)
        norm = {"normalization": normalization, "epsilon": epsilon}
        self.norm = Norm(in_features, name=f"{name}.norm", recipe=recipe, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))
