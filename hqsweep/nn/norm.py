"""Norm: LayerNorm or RMSNorm in float32, with a gain in the values of the recipe's `norm` quantizer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.nn.options import EPSILON
from hqsweep.nn.recipe_argument import RecipeArgument, module_quantizers
from hqsweep.nn.weight import QuantizedWeight

NORMALIZATIONS = ("RMSNorm", "LayerNorm")


class Norm(QuantizedWeight):
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

    def reset_parameters(self) -> None:
        """Gain one, bias zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
