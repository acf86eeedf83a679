"""LayerNormMLP: norm, linear, activation, linear."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.nn.layernorm_linear import LayerNormLinear
from hqsweep.nn.linear import Linear
from hqsweep.nn.options import LayerNormLinearOptions, MLPOptions
from hqsweep.nn.recipe_argument import RecipeArgument, whole_recipe
from hqsweep.nn.residual import AddsBranch
from hqsweep.recipe.roles import QuantizerRole


def gelu(x: Tensor) -> Tensor:
    """By its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """silu(g) * u with [g, u] = x: half the width (Shazeer, arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {"gelu": (gelu, 1), "swiglu": (swiglu, 2)}
"""Name -> function, and how many times its output's width its input has."""


class LayerNormMLP(AddsBranch):
    """x [..., D] -> fc2(activation(fc1(norm(x)))) [..., D]; `ffn` is the width of fc2's input.

    The activation is computed in float32. The linears are named `name`.fc1 and `name`.fc2.
    """

    def __init__(
        self,
        dim: int,
        ffn: int,
        *,
        name: str,
        recipe: RecipeArgument,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        options: MLPOptions = MLPOptions(),
    ) -> None:
        super().__init__()
        if options.activation not in ACTIVATIONS:
            raise ValueError(f"{name}: activation is {options.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        self.activation, times = ACTIVATIONS[options.activation]
        shared = {"recipe": whole_recipe(recipe, name), "bias": bias, "dtype": dtype}
        norm = LayerNormLinearOptions(normalization=options.normalization)
        self.fc1 = LayerNormLinear(dim, times * ffn, name=f"{name}.fc1", options=norm, **shared)
        self.fc2 = Linear(ffn, dim, name=f"{name}.fc2", **shared)

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """The roles of fc1, then those of fc2."""
        return self.fc1.get_quantizer_roles(fwd=fwd) + self.fc2.get_quantizer_roles(fwd=fwd)

    def forward(self, x: Tensor) -> Tensor:
        return self._added(x, None)[1]

    def _added(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        total, z = self.fc1.added(x, branch)
        return total, self.fc2(self.activation(z.float()))
