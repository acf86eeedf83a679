"""The compiled extension, and the decorator that makes its functions torch operators (library "hqsweep")."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from hqsweep.memo import constant_result
from hqsweep.torch_private import DispatchKey, DispatchKeySet, current_graph_task_id, current_raw_stream, dispatch_modes


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
