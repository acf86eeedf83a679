"""The layout in which tensor cores of sm_100 and later read block scales."""

import torch
from torch import Tensor


def swizzle(scales: Tensor) -> Tensor:
    """Return block scales in cuBLAS's layout: uint8 [rows, blocks] -> uint8 [pad128(rows) * pad4(blocks)].

    Input has one scale per block along the contracted axis. The output consists of tiles of 128 rows x 4 blocks, one
    row of
    tiles after the other. Entry (i, j) lies at
    ((i div 128) * T + j div 4) * 512 + (i mod 32) * 16 + ((i mod 128) div 32) * 4 + j mod 4, with T tiles per row.
    Padding
    is 0 (cuBLAS, "1D block scaling factors layout"; TransformerEngine common/cast/mxfp8/swizzle.cuh:30).
    """
    rows, blocks = scales.shape
    down, across = -(-rows // 128), -(-blocks // 4)
    padded = torch.nn.functional.pad(scales, (0, across * 4 - blocks, 0, down * 128 - rows))
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)
