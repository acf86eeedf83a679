"""What torch asks of a quantized tensor: results of operators, its memory, and how ranks gather it.

An operator has a handler (tensor_ops.py), or takes the rule for all others: compute on dequantize(), quantize written
arguments again, and return them themselves. The storage has no bytes: access raises
UserError, where torch would use address 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.parallel.shards.fsdp2 import ONE_ARGUMENT, note_trace
from hqsweep.quant.gathered_weight import stable_hash
from hqsweep.quant.hybrid import Direction
from hqsweep.torch_private import disabled_torch_function, schema_of, tree_map

HANDLERS: dict[Any, Callable] = {}
"""Operator -> the function that replaces it, with the operator's arguments."""


def implements(*operators: Any) -> Callable[[Callable], Callable]:
    """Register a handler for operators whose first argument is a quantized tensor."""

    def register(handler: Callable) -> Callable:
        HANDLERS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def dispatch(cls: type, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operator with at least one argument of type cls."""
    if args and isinstance(args[0], cls):
        if torch.is_inference_mode_enabled() and not args[0].is_inference():  # autograd counts writes of its views
            with torch.inference_mode(False), torch.no_grad():
                return dispatch(cls, func, args, kwargs)
        handler = args[0].handlers.get(func) or HANDLERS.get(func)
        if handler:
            return handler(*args, **kwargs)
    return _on_values(cls, func, args, kwargs)


def _on_values(cls: type, func: Any, args: tuple, kwargs: dict) -> Any:
    written: dict[int, tuple[Tensor, Any]] = {}

    def read(x: Any) -> Any:
        return x.dequantize() if isinstance(x, cls) else x

    def write(x: Any) -> Any:
        if not isinstance(x, cls):
            return x
        x.check_writable()
        preserved = x.high_precision_init_val
        values = x.dequantize() if preserved is None else preserved.to(x.device, x.dtype, copy=True)
        written[id(values)] = (values, x)
        return values

    def plain(argument: Any, value: Any) -> Any:
        writes = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        return tree_map(write if writes else read, value)

    schema = schema_of(func).arguments
    named = {argument.name: argument for argument in schema}
    plain_args = [plain(argument, value) for argument, value in zip(schema, args, strict=False)]
    plain_kwargs = {name: plain(named.get(name), value) for name, value in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for values, x in written.values():
        x.quantize_(values)
    return tree_map(lambda x: written[id(x)][1] if id(x) in written else x, result)


READ_OR_WRITE = (
    "__getitem__", "__setitem__", "byteswap", "clone", "copy_", "cpu", "cuda", "data_ptr", "fill_", "pin_memory",
    "share_memory_", "to", "tolist",
)  # fmt: skip
"""Storage methods that access bytes. Sizes, devices and comparisons work."""


def refuse_memory(owner: str, tensor: str, asked: str) -> UserError:
    """Return the error for access to the memory of a weight. owner: its module; tensor: its description; asked: the
    call."""
    where = f"{owner}: " if owner else ""
    return UserError(
        f"{where}{asked} asks for the memory of a weight that is held quantized, {tensor}, which lies in its operands;"
        " write a model by hqsweep.save_model, a state_dict by torch.save, and read values by dequantize()"
    )


class NoMemory(torch.UntypedStorage):
    """The storage of a quantized tensor."""

    owner: str
    tensor: str

    @classmethod
    def of(cls, storage: torch.UntypedStorage, owner: str, tensor: str) -> "NoMemory":
        """Change the class of the storage itself and return it: torch compares storages by identity."""
        storage.__class__ = cls
        storage.owner, storage.tensor = owner, tensor
        return storage

    def resize_(self, size: int) -> "NoMemory":
        """Accept size 0, its present size, which torch.compile gives to its own copy. UserError for any other."""
        if size:
            raise refuse_memory(self.owner, self.tensor, "untyped_storage().resize_")
        return self


def _refused(name: str) -> Callable[..., Any]:
    def method(self: NoMemory, *_: Any, **__: Any) -> None:
        raise refuse_memory(self.owner, self.tensor, f"untyped_storage().{name}")

    return method


for _name in READ_OR_WRITE:
    setattr(NoMemory, _name, _refused(_name))


class Shared:
    """State shared by a tensor and its views: the last quantization's key, and exchanges for writes together with other
    shards."""

    moved: str = ""
    """The buffers in memory given to replace_raw_data: "codes", "all", or "" for none."""
    layer = ""
    """The layer that owns the weight, for messages (ops.quantize.nonfinite)."""
    is_partial = False
    """Whether other ranks' rows are still to be gathered, and the columnwise operand is to be made from them."""

    def __init__(self, key: RngKey | None) -> None:
        self.key = key
        self.exchanges: dict[int, Any] = {}
        self.writes = [0]
        """Number of writes, including writes to members of a group."""


class TensorProtocol(torch.Tensor):
    """The base of HybridQuantizedTensor: torch's side of a tensor whose values lie in operands, not in its own memory.

    Operators read dequantize() unless a handler keeps the operands. Memory is refused. fully_shard gathers codes.
    """

    handlers: Mapping[Any, Any] = {}
    """Operator -> handler, for operators that a subclass handles itself."""

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(TensorProtocol, func, args, kwargs or {})

    @property
    def data(self) -> Self:
        """A view without autograd. Assigned values of this shape are written into the existing memory, as by copy_.

        UserError for another shape or device; module.to() can move the tensor.
        """
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        got, own = (f"{tuple(x.shape)} on {x.device}" for x in (value, self))
        if got != own:
            raise UserError(f"data: got a tensor {got} for a quantized one {own}; move it with to()")
        with torch.no_grad():
            self.copy_(value)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage without bytes. Reading or writing it raises UserError."""
        return NoMemory.of(torch.Tensor.untyped_storage(self), self.shared.layer, repr(self))

    def data_ptr(self) -> int:
        """Return 0: there is no memory. torch's own code that asks for the address raises RuntimeError."""
        return 0

    def storage(self) -> None:
        """Raise UserError: a tensor held in operands has no storage."""
        raise refuse_memory(self.shared.layer, repr(self), "storage")

    def __dlpack__(self, *_: Any, **__: Any) -> None:
        raise refuse_memory(self.shared.layer, repr(self), "__dlpack__")

    def numpy(self, *_: Any, **__: Any) -> None:
        """Raise UserError: arrays need values, which dequantize() gives."""
        raise refuse_memory(self.shared.layer, repr(self), "numpy")

    def share_memory_(self) -> Self:
        """Move the operands to shared memory, and return self."""
        for buffer in self.buffers.values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether the operands lie in shared memory."""
        return all(buffer.is_shared() for buffer in self.buffers.values())

    @property
    def fsdp_pre_all_gather(self) -> Callable:
        """The hook by which torch's fully_shard learns how to gather a shard: as codes and scales.

        A tensor that torch has not cut is a whole: without a mesh the hook gives its buffers and their description.
        UserError for such a tensor with a mesh.
        """
        if self.sharding is None:
            return self._whole_buffers
        gather = partial(self.sharding.pre, self)
        gather.__signature__ = ONE_ARGUMENT
        return gather

    def _whole_buffers(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The hook of a whole, with the five arguments of torch."""
        if mesh is not None:
            raise UserError(
                f"fully_shard: the weight held in {self.quantizer} is no part that torch has cut, so that it is not"
                " known how ranks share it"
            )
        names = [f"{direction}_{name}" for direction, name in self.metadata.stored]
        return tuple(self.buffers[name] for name in names), (self.metadata, tuple(self.shape))

    def fsdp_post_all_gather(
        self, received: Sequence[Tensor], told: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Self, Sequence[Tensor]] | None:
        """Return the whole tensor from all ranks' data, in `dtype` (torch's fully_shard calls this hook).

        After the first time, `out` is the earlier whole, which is filled again.
        """
        if self.sharding is not None:
            return self.sharding.post(self, told, dtype, is_first=out is None)
        metadata, shape = told
        names = [f"{direction}_{name}" for direction, name in metadata.stored]
        if out is None:
            gathered = dict(zip(names, received, strict=True))
            return type(self)(gathered, replace(metadata, dtype=dtype), shape), received
        for name, buffer in zip(names, received, strict=True):
            out.buffers[name].copy_(buffer)
        out.note_write(metadata.key)
        return out, received

    @classmethod
    def of_whole(cls, buffers: Mapping[str, Tensor], cut: Any, dtype: torch.dtype) -> Self:
        """Return the whole tensor of a Cut, made from these buffers."""
        return cls(buffers, replace(cut.metadata, dtype=dtype), cut.shape)

    def ready(self, direction: Direction) -> Self:
        """Gather a direction's buffers if ranks gather them for each pass; return self."""
        if torch.compiler.is_compiling():
            note_trace()
        elif self.planes is not None:
            self.planes.ready(direction)
        return self

    def _stable_hash_for_caching(self) -> str:
        """Return the text with which torch keys cached graphs; torch's own hash fails for symbolic sizes."""
        return stable_hash(self)
