"""Allocation, checks and addresses of tensors for the extension.

The extension does not link to torch, so that one build serves every torch. It gets addresses.
"""

import math
from collections.abc import Sequence
from ctypes import c_int64
from itertools import accumulate

import torch
from torch import Tensor

from hqsweep.formats import RngKey, RngKeys
from hqsweep.memo import memo
from hqsweep.ops.library import described
from hqsweep.torch_private import empty_strided_cpu, empty_strided_cuda


def empty(x: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on x's device, which must be the current device."""
    return (empty_strided_cuda if x.is_cuda else empty_strided_cpu)(shape, stride, dtype)


def in_one_memory(x: Tensor, tensors: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return uninitialised contiguous tensors that share one allocation; each starts at a multiple of 16 bytes.

    tensors: (shape, stride, dtype) of each, in the order in which they lie in memory.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, _, dtype in tensors]
    starts = list(accumulate((-(-size // 16) * 16 for size in sizes), initial=0))
    memory = empty(x, (starts[-1],), (1,), torch.uint8)
    return [
        memory[start : start + size].view(dtype).view(shape)
        for (shape, _, dtype), start, size in zip(tensors, starts, sizes, strict=False)
    ]


def check_offsets(x: Tensor, offsets: Tensor) -> int:
    """Return the number of members. ValueError for offsets that the kernels cannot read."""
    members = offsets.numel() - 1
    readable = offsets.dtype is torch.int64 and offsets.dim() == 1 and members >= 0 and offsets.is_contiguous()
    if not readable or offsets.device != x.device or offsets.data_ptr() == 0:
        raise ValueError(f"offsets are {described(offsets)}; they take int64 [members + 1], contiguous, on {x.device}")
    return members


def integers(offsets: Tensor) -> list[int]:
    """Return the entries of checked CPU offsets. They are read from memory, since methods of a tensor could wait."""
    return list((c_int64 * offsets.numel()).from_address(offsets.data_ptr()))


def check_sizes(offsets: Tensor, sizes: Sequence[int]) -> None:
    """Raise ValueError unless the offsets agree with the sizes that outputs were allocated for.

    offsets: checked, on the CPU.
    """
    if integers(offsets) != [0, *accumulate(sizes)]:
        raise ValueError(f"offsets are {integers(offsets)} for members of {list(sizes)} rows")


def check_keys(x: Tensor, keys: Tensor | None, members: int) -> None:
    """Raise ValueError for a key table that the kernels cannot read."""
    if keys is None:
        return
    readable = keys.dtype == torch.int32 and keys.shape == (members, 2) and keys.is_contiguous()
    if not readable or keys.device != x.device or (members and keys.data_ptr() == 0):
        raise ValueError(f"keys are {described(keys)}; they take int32 [{members}, 2], contiguous, on {x.device}")


def step_address(x: Tensor, step: Tensor | None) -> int:
    """Return the address from which kernels read a key's step; 0 for None.

    ValueError for a step that the kernels cannot read.
    """
    if step is None:
        return 0
    readable = step.dtype is torch.int64 and step.numel() == 1 and step.device == x.device
    if not readable or step.data_ptr() == 0:
        raise ValueError(f"step is {described(step)}; it takes int64 [1] on {x.device}")
    return step.data_ptr()


def key_table(keys: Sequence[RngKey], device: torch.device) -> Tensor:
    """Return int32 [members, 2]: the words of each member's Philox key.

    Equal words give the same tensor, except in traces, which each make their own.
    """
    words = keys.words if isinstance(keys, RngKeys) else tuple(key.words for key in keys)
    if torch.compiler.is_compiling():
        return torch.tensor(_signed(words), dtype=torch.int32, device=device).view(-1, 2)
    return _key_table(words, device)


def key_tables() -> list[Tensor]:
    """Return all cached key tables. A captured CUDA graph must keep them alive as long as it is replayed."""
    return list(_key_table.results.values())


@memo
def _key_table(words: tuple, device: torch.device) -> Tensor:
    return torch.tensor(_signed(words), dtype=torch.int32).view(-1, 2).to(device)


@memo
def _signed(words: tuple) -> list[int]:
    """Return the words as int32 values, two per member. words: RngKeys.words, or a pair per key."""
    if words and not isinstance(words[0], tuple):
        words = tuple((words[0], slot) for slot in words[1])
    return [word - (word >> 31 << 32) for pair in words for word in pair]
