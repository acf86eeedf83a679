"""Arithmetic that formats share: a correctly rounded division, and one entry a tile over a whole matrix."""

import torch
from torch import Tensor


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
