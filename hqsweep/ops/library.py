"""The compiled extension, and the decorator that makes its functions torch operators (library "hqsweep").

The extension does not link to torch, so that one build serves every torch. It gets addresses of checked tensors.
"""

import math
from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from hqsweep.formats import RngKey, RngKeys
from hqsweep.memo import constant_result, memo
from hqsweep.torch_private import (
    DispatchKey,
    DispatchKeySet,
    current_graph_task_id,
    current_raw_stream,
    dispatch_modes,
    empty_strided_cpu,
    empty_strided_cuda,
)


@cache
def extension():
    """Return the compiled module hqsweep._C, or None if it was not built."""
    try:
        from hqsweep import _C
    except ImportError:
        return None
    return _C


@cache
def _devices() -> tuple[str, ...]:
    if extension() is None:
        return ()
    return ("cpu", "cuda") if extension().build_info()["cuda"] else ("cpu",)


@constant_result
def has_kernels(device_type: str) -> bool:
    """Return whether the extension was built for this device type."""
    return device_type in _devices()


_library = Library("hqsweep", "DEF")
PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor types without behaviour of their own, so that operators may skip torch's dispatcher."""


def direct(x: Tensor) -> bool:
    """Return whether an operator's function may be called directly, without torch's dispatcher.

    This holds outside traced graphs and dispatch modes. Dispatch costs more than the launch, and codes have no gradient
    to record. Tensors with the negative bit are dispatched: torch then passes a copy whose memory holds the true signs.
    """
    plain = type(x) in PLAIN and not torch.compiler.is_compiling() and not dispatch_modes()
    return plain and (x.is_cpu or x.is_cuda) and not x.is_neg()


def on_its_device(function: Callable) -> Callable:
    """Decorate a function so that the device of its first argument, a tensor or a list of tensors, is current."""

    @wraps(function)
    def guarded(first, *others, **options):
        device = (first[0] if isinstance(first, list) else first).get_device()
        if device == torch.cuda.current_device():
            return function(first, *others, **options)
        with torch.cuda.device(device):
            return function(first, *others, **options)

    return guarded


def _refusing_none(dispatched: Any) -> Callable:
    """Return a BackendSelect kernel that raises a short ValueError if the list of tensors is empty.

    Without it, torch finds no device for such a call and prints a page.
    """

    def select(keys: DispatchKeySet, tensors: list[Tensor], *others):
        if not tensors:
            raise ValueError(f"{dispatched.overloadpacket}: there are no buffers; the first argument is an empty list")
        return dispatched.redispatch(keys.remove(DispatchKey.BackendSelect), tensors, *others)

    return select


def operator(schema: str, *, fake: Callable, devices: tuple[str, ...] = ("CPU", "CUDA")) -> Callable:
    """Return a decorator that registers a function as an operator. The result calls the function directly if possible.

    schema: torch's schema, whose name comes first. fake: computes the outputs in traced graphs.
    """
    name = schema.partition("(")[0]

    def define(function: Callable) -> Callable:
        guarded = on_its_device(function)
        _library.define(schema)
        for device in devices:
            _library.impl(name, function if device == "CPU" else guarded, device)
        register_fake(f"hqsweep::{name}", fake, lib=_library)
        dispatched = getattr(torch.ops.hqsweep, name).default
        if "(Tensor[] " in schema:
            _library.impl(name, _refusing_none(dispatched), "BackendSelect", with_keyset=True)

        @wraps(function)
        def call(first, *others):
            x = first[0] if type(first) is list and first else first
            if not direct(x):
                return dispatched(first, *others)
            for other in others:
                if type(other) in PLAIN and other.is_neg():
                    return dispatched(first, *others)
            return (function if x.is_cpu else guarded)(first, *others)

        return call

    return define


def where(x: Tensor) -> tuple:
    """Return the last arguments of a kernel call: the stream on CUDA, else the thread count and "" (best instruction
    set)."""
    # A tenth of the time of torch.cuda.current_stream(), which wraps this number in an object.
    return (current_raw_stream(x.get_device()),) if x.is_cuda else (torch.get_num_threads(), "")


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_graph_task_id() != -1


def described(tensor: Tensor) -> str:
    """Return the dtype, shape and device of a tensor as text for messages."""
    note = "" if tensor.is_contiguous() else ", not contiguous"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        note += ", without storage"
    return f"{tensor.dtype} {tuple(tensor.shape)}{note} on {tensor.device}"


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
