"""Norm: LayerNorm or RMSNorm in float32, with a gain in the values of the recipe's `norm` quantizer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.nn.options import EPSILON
from hqsweep.nn.recipe_argument import RecipeArgument, module_quantizers
from hqsweep.nn.residual import AddsBranch, add_branch
from hqsweep.nn.weight import QuantizedWeight
from hqsweep.ops.kernels import in_dtype

NORMALIZATIONS = ("RMSNorm", "LayerNorm")


class Norm(AddsBranch, QuantizedWeight):
    """x [..., D] -> float32 [..., D], normalized over the last axis, times the gain [D] (LayerNorm: plus a bias [D]).

    RMSNorm: x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich, arXiv 1910.07467). LayerNorm: (x - mean(x)) /
    sqrt(var(x) + epsilon) (Ba et al., arXiv 1607.06450). Role: QuantizerRole("norm", "weight", name).
    """

    module_type = "norm"

    def __init__(
        self, dim: int, *, name: str, recipe: RecipeArgument, normalization: str = "RMSNorm", epsilon: float = EPSILON
    ) -> None:
        super().__init__()
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"{name}: normalization is {normalization!r}; allowed: {', '.join(NORMALIZATIONS)}")
        self.name, self.epsilon = name, epsilon
        self.quantizers, _ = module_quantizers(recipe, self.module_type, name)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        x, shape, weight = x.float(), (x.shape[-1],), self.quantized_weight()
        if self.bias is None:
            return F.rms_norm(x, shape, weight, self.epsilon)
        return F.layer_norm(x, shape, weight, self.bias, self.epsilon)

    def added(self, x: Tensor, branch: Tensor | None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm rounded to `dtype`), with the sum as add_branch gives it."""
        total, h = super().added(x, branch)
        return total, in_dtype(h, dtype)

    def _added(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        total = add_branch(x, branch)
        return total, self.forward(total)

    def reset_parameters(self) -> None:
        """Gain one, bias zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
