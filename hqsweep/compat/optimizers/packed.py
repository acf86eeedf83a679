"""States of an optimizer in fewer bits: float16 and FP8 with one scale for each tensor, and bfloat16.

A state is unpacked to float32 for a step, and packed after it. The scale is the largest magnitude, divided by half of
float16's largest value, or by 448 for FP8 (E4M3). So moments neither overflow nor vanish.
"""

from typing import Any

import torch
from torch import Tensor

from hqsweep.compat.quantizers import DType, Float8Quantizer
from hqsweep.errors import UserError
from hqsweep.parallel.wire.local import is_spread, local, spread_like
from hqsweep.quant import HybridQuantizedTensor

LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}
"""dtype with a scale -> the value that the largest magnitude gets."""


class Packed:
    """A state in float16 or FP8 (uint8): its values divided by `scale`, float32 [1]."""

    def __init__(self, values: Tensor, scale: Tensor, shape: torch.Size) -> None:
        self.values, self.scale, self.shape = values, scale, shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values; uint8 for FP8."""
        return torch.uint8 if isinstance(self.values, HybridQuantizedTensor) else self.values.dtype

    def unpacked(self) -> Tensor:
        """float32."""
        if isinstance(self.values, HybridQuantizedTensor):
            return self.values.dequantize(dtype=torch.float32).view(self.shape)
        return self.values.float() * self.scale


def packed(p: Tensor, state: Tensor, dtype: torch.dtype) -> Any:
    """A float32 state of a parameter in another dtype. UserError for shards with a scale."""
    if dtype is torch.float32:
        return state
    if dtype is torch.bfloat16:
        return spread_like(p, local(state).to(dtype))
    if is_spread(state):
        raise UserError(f"FusedAdam: shards of parameters take states in float32 or bfloat16, not in {dtype}")
    scale = (state.abs().amax() if state.numel() else state.new_zeros(())).reshape(1) / LARGEST[dtype]
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    if dtype is torch.float16:
        return Packed((state * inverse).half(), scale, state.shape)
    quantizer = Float8Quantizer(inverse, torch.zeros_like(scale), DType.kFloat8E4M3, columnwise=False)
    return Packed(quantizer(state.view(1, -1)), scale, state.shape)


def unpacked(p: Tensor, state: Any) -> Tensor:
    """The float32 state of a parameter."""
    if isinstance(state, Packed):
        return state.unpacked()
    return state if state.dtype is torch.float32 else spread_like(p, local(state).float())
