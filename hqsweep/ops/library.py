"""The compiled extension, and how a function of it becomes a torch operator of the library hqsweep."""

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor
from torch.library import Library, register_fake

from hqsweep.memo import constant_result


@cache
def extension():
    """The compiled module hqsweep._C, or None when it was not built."""
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
    """Whether the extension was built, and for that type of device."""
    return device_type in _devices()


_library = Library("hqsweep", "DEF")
PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that are nothing but memory: no operator means anything else for them."""


def direct(x: Tensor) -> bool:
    """Whether the function behind an operator can be called at once: outside of traced graphs and dispatch modes, where
    dispatch costs more than the launch and there is nothing to record (no gradient flows through codes). torch's
    dispatcher gives operators a copy of a tensor with the negative bit, whose memory has the opposite signs."""
    plain = type(x) in PLAIN and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    return plain and (x.is_cpu or x.is_cuda) and not x.is_neg()


def on_its_device(function: Callable) -> Callable:
    """function(tensor or tensors, ...) with the tensor's device as the current one."""

    @wraps(function)
    def guarded(first, *others, **options):
        device = (first[0] if isinstance(first, list) else first).get_device()
        if device == torch.cuda.current_device():
            return function(first, *others, **options)
        with torch.cuda.device(device):
            return function(first, *others, **options)

    return guarded


def _refusing_none(dispatched: torch._ops.OpOverload) -> Callable:
    """What torch's dispatcher asks before it chooses a device: for a call of an operator whose tensors are an empty
    list it would find none, and say so in a page."""

    def select(keys: torch._C.DispatchKeySet, tensors: list[Tensor], *others):
        if not tensors:
            raise ValueError(f"{dispatched.overloadpacket}: there are no buffers; the first argument is an empty list")
        return dispatched.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), tensors, *others)

    return select


def operator(schema: str, *, fake: Callable, devices: tuple[str, ...] = ("CPU", "CUDA")) -> Callable:
    """A decorator that makes a function an operator, and returns a function that calls it: directly where that is
    possible, else through torch's dispatcher. fake: its results in traced graphs."""
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
    """The last arguments of a call: the current stream, or torch's threads and the best instruction set."""
    # What torch.cuda.current_stream() wraps in an object, at a tenth of its time.
    return (torch._C._cuda_getCurrentRawStream(x.get_device()),) if x.is_cuda else (torch.get_num_threads(), "")


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1
