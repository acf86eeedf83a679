"""The random Hadamard transform of +rht, for formats of 4 bits: y = v * diag(d) * H / sqrt(n) over groups of n.

Groups follow each other along the contracted axis; n is 16 (+rht), 32, 64 or 128 (+rht32, +rht64, +rht128). The result
is rounded to bfloat16. Both operands of a product have the same d and n, so the transform cancels:
(A R)(R' B) = A B. The sums are float32 butterflies with strides 1, 2, 4, ... on CPU and CUDA. TransformerEngine's
tensor-core order for 16 is undocumented; it agrees if the float32 sum is exact. +nosign takes d = 1. The first 16 signs
are TransformerEngine's (pytorch/tensor/nvfp4_tensor.py), the others come from SHA-256 of "hqsweep.hadamard".
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError

SIGNS_OF_16 = 0xD7E8
"""Bit i: element i of a group is negated."""


def _signs() -> tuple[int, ...]:
    drawn = int.from_bytes(hashlib.sha256(b"hqsweep.hadamard").digest()[:16], "little")
    bits = drawn >> 16 << 16 | SIGNS_OF_16
    return tuple(-1 if bits >> i & 1 else 1 for i in range(128))


SIGNS = _signs()
"""d of the transform; a group of n takes the first n."""


def hadamard(x: Tensor, *, size: int = 16, signed: bool = True) -> Tensor:
    """Return the unrounded float32 transform of x [rows, cols], cols a multiple of size. signed=False takes d = 1."""
    groups = x.float().reshape(-1, size) * torch.tensor(size**-0.5, dtype=torch.float32, device=x.device)
    if signed:
        groups = groups * torch.tensor(SIGNS[:size], dtype=torch.float32, device=x.device)
    stride = 1
    while stride < size:
        pairs = groups.view(-1, size // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack((a + b, a - b), dim=2).view(-1, size)
        stride *= 2
    return groups.view(x.shape)


def transformed(format: Any, x: Tensor) -> Tensor:
    """Return x as the format approximates it: its transform in bfloat16 with +rht, else x itself."""
    if not format.rht:
        return x
    format.check_shape(*x.shape)
    return hadamard(x, size=format.rht, signed=format.rht_signed).bfloat16()


def check_signs(format: Any) -> None:
    """Raise UserError for +nosign without a transform."""
    if not format.rht and not format.rht_signed:
        raise UserError(f"{format.name}: nosign describes the transform of +rht; add +rht or drop it")
