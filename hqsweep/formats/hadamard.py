"""The random Hadamard transform of +rht, for formats of 4 bits: y = v * diag(d) * H / sqrt(n) over groups of n.

Groups follow each other along the contracted axis; n is 16 (+rht), 32, 64 or 128 (+rht32, +rht64, +rht128). The result
is rounded to bfloat16. Both operands of a product have the same d and n, so the transform cancels:
(A R)(R' B) = A B. The sums are float32 butterflies with strides 1, 2, 4, ... on CPU and CUDA. TransformerEngine's
tensor-core order for 16 is undocumented; it agrees if the float32 sum is exact. +nosign takes d = 1. The first 16 signs
are TransformerEngine's (pytorch/tensor/nvfp4_tensor.py), the others come from SHA-256 of "hqsweep.hadamard".

+eden draws d anew for every seed and step (drawn_signs). The slot does not matter, so both operands of a product agree.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats.random import PlacedKey, RngKey, slot_word, words_at

SIGNS_OF_16 = 0xD7E8
"""Bit i: element i of a group is negated."""


def _signs() -> tuple[int, ...]:
    drawn = int.from_bytes(hashlib.sha256(b"hqsweep.hadamard").digest()[:16], "little")
    bits = drawn >> 16 << 16 | SIGNS_OF_16
    return tuple(-1 if bits >> i & 1 else 1 for i in range(128))


SIGNS = _signs()
"""d of the transform; a group of n takes the first n."""


DRAWN = slot_word("hqsweep.hadamard")
"""The second word of the Philox key of drawn signs."""


def drawn_signs(key: RngKey | PlacedKey, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [128] of 1 and -1: d under the key's seed and step. A group of n takes the first n.

    Element i is negated by bit i % 32 of word i // 32 of the Philox output with counter (0, step), key (seed, DRAWN).
    """
    words = words_at((key.words[0], DRAWN), key, torch.zeros(1, dtype=torch.int64, device=device))
    bits = words.view(4, 1) >> torch.arange(32, device=device) & 1
    return (1 - 2 * bits).float().view(-1)


def hadamard(x: Tensor, *, size: int = 16, signed: bool = True, signs: Tensor | None = None) -> Tensor:
    """Return the unrounded float32 transform of x [rows, cols], cols a multiple of size. signed=False takes d = 1.

    signs: float32 [size or more], in place of SIGNS.
    """
    groups = x.float().reshape(-1, size) * torch.tensor(size**-0.5, dtype=torch.float32, device=x.device)
    if signs is not None:
        groups = groups * signs[:size]
    elif signed:
        groups = groups * torch.tensor(SIGNS[:size], dtype=torch.float32, device=x.device)
    stride = 1
    while stride < size:
        pairs = groups.view(-1, size // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack((a + b, a - b), dim=2).view(-1, size)
        stride *= 2
    return groups.view(x.shape)


def transformed(format: Any, x: Tensor, key: RngKey | PlacedKey | None = None) -> Tensor:
    """Return x as the format approximates it: its transform in bfloat16 with +rht, else x itself.

    ValueError for drawn signs without a key.
    """
    if not format.rht:
        return x
    format.check_shape(*x.shape)
    signs = None
    if format.rht_drawn:
        if key is None:
            raise ValueError(f"{format.text}: the transform's signs need an RngKey")
        signs = drawn_signs(key, x.device)
    return hadamard(x, size=format.rht, signed=format.rht_signed, signs=signs).bfloat16()


def check_signs(format: Any) -> None:
    """Raise UserError for +nosign without a transform."""
    if not format.rht and not format.rht_signed:
        raise UserError(f"{format.name}: nosign describes the transform of +rht; add +rht or drop it")
