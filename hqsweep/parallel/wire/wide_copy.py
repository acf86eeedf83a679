"""Copies of strided tensors in units of up to 16 bytes, which is faster than torch's copies element by element."""

import torch
from torch import Tensor

_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16)
"""dtypes whose elements serve as units, the widest first. A copy never looks at the values."""


def in_order(x: Tensor) -> Tensor:
    """x.contiguous(), by a wide copy."""
    return x if x.is_contiguous() else as_words(x)[0].contiguous().view(x.dtype)


def copy_(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), by a wide copy. Both have one dtype and shape."""
    into, values = as_words(target, source)
    into.copy_(values)


def as_words(*tensors: Tensor, most: int = 16) -> list[Tensor]:
    """Views of the tensors, all of one dtype, as the widest units of at most `most` bytes that fit all of them."""
    for word in _WORDS:
        if word.itemsize <= most and all(_consists_of(x, word.itemsize) for x in tensors):
            return [x.view(word) for x in tensors]
    return list(tensors)


def _consists_of(x: Tensor, size: int) -> bool:
    if x.dim() == 0 or x.itemsize >= size or x.stride(-1) != 1 or torch.compiler.is_compiling() or x.is_neg():
        return False
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.numel() > 0 and x.data_ptr() % size == 0 and all(step * x.itemsize % size == 0 for step in steps)
