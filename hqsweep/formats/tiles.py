"""Arithmetic that formats share: a correctly rounded division, the scale of an amax, and one entry a tile over a whole
matrix.
"""

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max


def expand_tiles(tiles: Tensor, shape: tuple[int, int], rows: int, cols: int) -> Tensor:
    """Repeat one entry a tile over a matrix of `shape`; axes with one entry stay broadcastable views."""
    if tiles.shape[0] > 1 and rows > 1:
        tiles = tiles.repeat_interleave(rows, dim=0)[: shape[0]]
    if tiles.shape[1] > 1 and cols > 1:
        tiles = tiles.repeat_interleave(cols, dim=1)[:, : shape[1]]
    return tiles


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """fl(numerator / denominator), correctly rounded: torch's python_scalar / tensor is reciprocal times scalar."""
    return torch.full_like(denominator, numerator) / denominator


def fp8_scale(amax: Tensor, *, fp8_max: float, epsilon: float, pow2: bool, inf_value: float) -> Tensor:
    """S(amax): scale = fl(fp8_max / max(amax, epsilon)), truncated to a power of two with pow2; 1 for amax 0 or inf.

    A quotient that overflows becomes inf_value (before the truncation). float32 in, float32 out, same shape.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = divide(fp8_max, amax)
    scale = torch.where(torch.isinf(scale), inf_value, scale)
    if pow2:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)
