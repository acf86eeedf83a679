"""HybridQuantizedTensor: a parameter that is held as its two quantized operands, and as nothing else.

It is a torch.Tensor of the logical shape and dtype, so that modules, optimizers and checkpoints take it for a weight.
Its value is what its operands decode to. Operations that keep the operands (views, copies, moves) give the same type;
all others read dequantize(), and those in place quantize what they computed (quant/tensor_ops.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.parallel.shards.fsdp2 import ONE_ARGUMENT, note_trace
from hqsweep.parallel.shards.shard_agree import quantize_shards_
from hqsweep.parallel.shards.shard_part import Part, quantize_part
from hqsweep.parallel.shards.shard_place import Place
from hqsweep.quant.content import Content, OneMatrix
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.gathered_weight import stable_hash
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.metadata import Metadata
from hqsweep.quant.no_memory import NoMemory, refuse_memory
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.quant.tensor_dispatch import dispatch

INIT_VAL = "high_precision_init_val"
KINDS: dict[str, type] = {}
"""The name of a class of quantized tensors, as files have it -> the class."""


class _Shared:
    """What a tensor and its views have in common: the key of the last quantization, and the exchanges by which ranks
    write it together with other shards."""

    moved: str = ""
    """What lies in memory that replace_raw_data was given: "codes", "all", or nothing."""
    layer = ""
    """The layer whose weight the tensor is, for messages (ops.nonfinite)."""
    is_partial = False
    """Whether rows of other ranks are still to be gathered, and the columnwise operand to be made of them."""

    def __init__(self, key: RngKey | None) -> None:
        self.key = key
        self.exchanges: dict[int, Any] = {}
        self.writes = [0]
        """How often values were written, also to members of a group."""


class HybridQuantizedTensor(torch.Tensor):
    """The operands of `quantizer` for a tensor [..., cols]; make it with quantize() or empty().

    rowwise encodes [rows, cols] (leading axes folded), columnwise its transpose; a direction that is not held is None.
    """

    quantizer: HybridQuantizer
    rowwise: Operand | None
    columnwise: Operand | None
    states: SlotStates | None
    """The states of the slot that the tensor is held for, where a direction is in fp8_delayed; views share them, copies
    have none."""
    high_precision_init_val: Tensor | None
    """The value that preserve_high_precision_init_val keeps, on the CPU."""

    sharding: Any
    """How ranks gather the tensor (Sharding), for a part that is cut along the first axis, and for what was cut so;
    views and copies have it, too."""
    planes: Any
    """The Sharding of a whole that torch's fully_shard has gathered, which says which buffers are there."""
    part: Part | None
    """How ranks share the matrix of which the tensor, or each member, is a part (quant.held_part), or a shard of such a
    part; its metadata's place is then one in that part."""

    content_type: type[Content] = OneMatrix
    """The kind of content that tensors of the class have."""
    handlers: Mapping[Any, Any] = {}
    """The operators that a subclass handles itself, and their handlers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, buffers: Mapping[str, Tensor], metadata: Metadata, shape: Sequence[int]) -> Self:
        device = next(buffers[f"{direction}_{name}"].device for direction, name in metadata.stored)
        options = {"dtype": metadata.dtype, "device": device, "storage_size": 0}
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), **options)
        self._metadata, self.shared = metadata, _Shared(metadata.key)
        self.quantizer, self.states, self.high_precision_init_val = metadata.quantizer, None, None
        self.sharding = self.planes = self.part = None
        self.hold(buffers)
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    @classmethod
    def empty(
        cls,
        shape: Sequence[Any],
        quantizer: HybridQuantizer,
        *,
        dtype: torch.dtype = torch.bfloat16,
        source_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        directions: Sequence[str] = DIRECTIONS,
        key: RngKey | None = None,
        place: Place | None = None,
    ) -> Self:
        """A tensor with uninitialised buffers, on any device, meta too; UserError for a shape that a format cannot
        hold.

        shape: [..., cols]; for a GroupedTensor [E, N, K], or [m_e, k_e] of each member: where these differ the group is
        flat, else it is [E, m, k]. place: the tensor is a shard, whose operands encode its cover (Place.cover).
        """
        content, shape = cls.content_type.of(shape)
        options = {"dtype": dtype, "source_dtype": source_dtype, "directions": directions, "key": key, "place": place}
        metadata = Metadata.of(content, quantizer, **options)
        return cls(metadata.empty(device), metadata, shape)

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        quantizer: HybridQuantizer,
        *,
        source_dtype: torch.dtype | None = None,
        directions: Sequence[str] = DIRECTIONS,
        key: RngKey | None = None,
        states: SlotStates | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> Self:
        """The quantized form of x [..., cols] (bf16, fp16 or fp32), with x's shape and dtype, in memory of its own.

        x is rounded to source_dtype (default: its own) before it is quantized. key: stream of +sr; states: those of
        fp8_delayed, which the tensor keeps. With preserve_high_precision_init_val a copy of x is kept on the CPU,
        follows later writes, and is what an optimizer starts its masters from. UserError for a shape that a format
        cannot hold, for +sr without a key and for fp8_delayed without states.
        """
        options = {"dtype": x.dtype, "source_dtype": source_dtype, "device": x.device, "directions": directions}
        keep = {"key": key, "states": states, "preserve": preserve_high_precision_init_val}
        return cls.empty(x.shape, quantizer, **options).begin_with(x, **keep)

    def begin_with(self, x: Tensor, *, key: RngKey | None, states: Any, preserve: bool) -> Self:
        """Give an empty tensor its values, and what `quantize` says that it keeps; returns self."""
        self.states = states
        self.quantize_(x, key=key)
        if preserve:
            self.high_precision_init_val = x.detach().clone() if x.is_meta else x.detach().to("cpu", copy=True)
        return self

    def quantize_(
        self, x: Tensor | Sequence[Tensor], *, key: RngKey | None = None, group: ProcessGroup | None = None
    ) -> Self:
        """Overwrite both directions with the quantized form of x, in the memory they have; returns self.

        x: of self's shape, in any floating dtype; for a group also a tensor for each member, of its shape. key: stream
        of +sr; by default the step of the last key plus one. A shard takes its own part of x, and the process group
        whose ranks hold the whole and all call this (agree.quantize_shards_); by default it is the group that gathers
        the shard. UserError for another shape, for +sr without any key, for a part that shares its scale with a whole,
        and for a shard that lacks its group.
        """
        if self.metadata.place is not None:
            group = group or (self.sharding and self.sharding.group)
            quantize_shards_([self], [x], [key], group)
            return self
        x, key = self.begin_write(x, key)
        with torch.no_grad():
            nothing = self.is_meta or x.is_meta or not x.numel()
            operands = None if nothing else self.encode(x.to(self.device, self.source_dtype), key, self.part)
        return self.end_write(operands, x, key)

    def begin_write(self, x: Tensor | Sequence[Tensor], key: RngKey | None) -> tuple[Tensor, RngKey | None]:
        """The plain values that quantize_() was given, and the key that they are quantized by; UserError as there."""
        x = x if isinstance(x, Tensor) else self.metadata.content.joined(x).view(self.shape)
        if tuple(x.shape) != tuple(self.shape):
            raise UserError(f"quantize_: got {tuple(x.shape)} for a tensor of shape {tuple(self.shape)}")
        if x.is_complex():
            raise UserError(f"quantize_: got {x.dtype}, whose imaginary parts would be lost; give its real part")
        self.check_writable()
        with torch.no_grad():
            return (x.dequantize() if isinstance(x, HybridQuantizedTensor) else x), self.next_key(key)

    def end_write(self, operands: Any, x: Tensor, key: RngKey | None) -> Self:
        """Take these operands of x, made under this key (None on the meta device, and without elements); returns
        self."""
        with torch.no_grad():
            if operands is not None:
                self.write_(operands)
            if self.high_precision_init_val is not None:
                self.high_precision_init_val.copy_(x)
        return self.note_write(key)

    def note_write(self, key: RngKey | None) -> Self:
        """Note, for autograd too, that the bytes are others, drawn with this key; returns self."""
        torch.autograd.graph.increment_version(self)
        self.shared.writes[0] += 1
        return self.set_key(key)

    @property
    def source_dtype(self) -> torch.dtype:
        """The dtype to which values are rounded before they are quantized."""
        return self._metadata.source_dtype

    def set_key(self, key: RngKey | None) -> Self:
        """Note, for all views too, which key the present bytes were drawn with; returns self."""
        self.shared.key = key
        return self

    def write_(self, operands: Any) -> None:
        """Copy the buffers of an equal quantizer's operands (of the directions held) into these."""
        for own, buffer in self.copies(operands):
            own.copy_(buffer)
        self.shared.is_partial = False
        self.shared.writes[0] += 1

    def copies(self, operands: Any) -> list[tuple[Tensor, Tensor]]:
        """Each buffer, and that which write_() copies into it."""
        stored = self.metadata.stored
        return [tuple(getattr(x, direction).buffers[name] for x in (self, operands)) for direction, name in stored]

    def check_writable(self) -> None:
        """UserError for a part whose scale belongs to the whole tensor."""
        if self.metadata.shares_scale:
            raise UserError(
                f"a slice of a tensor in {self.quantizer} shares its scale with the rest and cannot be written alone;"
                " write the whole tensor"
            )

    def check_complete(self) -> None:
        """UserError while the tensor has the rows of this rank alone: what reads it would take old codes for those of
        other ranks."""
        if self.shared.is_partial:
            raise UserError(
                f"the weight held in {self.quantizer} has the rows of this rank's masters alone: gather its raw data,"
                " and call hqsweep.quant.post_all_gather_processing"
            )

    @property
    def data(self) -> Self:
        """A view that autograd does not know. Values of this shape that are assigned are written, as by copy_, into the
        memory that is there; UserError for another shape or device, which module.to() can move to."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        got, own = (f"{tuple(x.shape)} on {x.device}" for x in (value, self))
        if got != own:
            raise UserError(f"data: got a tensor {got} for a quantized one {own}; move it with to()")
        with torch.no_grad():
            self.copy_(value)

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage without bytes, which refuses to be read and written by UserError."""
        return NoMemory.of(torch.Tensor.untyped_storage(self), self.shared.layer, repr(self))

    def storage(self) -> None:
        """UserError: a tensor in operands has none."""
        raise refuse_memory(self.shared.layer, repr(self), "storage")

    def __dlpack__(self, *_: Any, **__: Any) -> None:
        raise refuse_memory(self.shared.layer, repr(self), "__dlpack__")

    def numpy(self, *_: Any, **__: Any) -> None:
        """UserError: arrays have values; dequantize() gives them."""
        raise refuse_memory(self.shared.layer, repr(self), "numpy")

    def share_memory_(self) -> Self:
        """Move the operands to memory that processes share; returns self."""
        for buffer in self.buffers.values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the operands lie in memory that processes share."""
        return all(buffer.is_shared() for buffer in self.buffers.values())

    def hold(self, buffers: Mapping[str, Tensor]) -> None:
        """Have these tensors as buffers: those of both operands, by their names. Views keep those that they have."""
        for name, buffer in buffers.items():
            setattr(self, name, buffer)  # where callers of __tensor_flatten__ look for them
        for direction in DIRECTIONS:
            setattr(self, direction, self._metadata.operand(buffers, direction))

    def drop(self, direction: Direction) -> Self:
        """Give up one direction, in place, and free its memory once no view holds it; returns self.

        Later writes make the other direction alone, with the bytes that it has in both, and a product that reads the
        dropped one raises UserError. Nothing happens where the direction is not held. UserError for the only one, and
        for another word.
        """
        if direction not in DIRECTIONS:
            raise UserError(f"drop: direction is '{direction}'; allowed: {', '.join(DIRECTIONS)}")
        if direction not in self.metadata.directions:
            return self
        if len(self.metadata.directions) == 1:
            raise UserError(f"drop: {direction} is the only direction that this tensor in {self.quantizer} holds")
        [other] = (held for held in DIRECTIONS if held != direction)
        buffers = {f"{other}_{n}": buffer.contiguous() for n, buffer in getattr(self, other).buffers.items()}
        for held, name in self.metadata.stored:
            delattr(self, f"{held}_{name}")
        self._metadata = replace(self.metadata, directions=(other,))
        self.hold(buffers)
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of dtype (default: own dtype); from the rowwise operand where it is held.

        Gradients pass unchanged. UserError where only a columnwise operand under the Hadamard transform is held.
        """
        return _Dequantize.apply(self, dtype or self.dtype)

    def get_high_precision_init_val(self) -> Tensor | None:
        """high_precision_init_val under TransformerEngine's name."""
        return self.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the value that preserve_high_precision_init_val keeps."""
        self.high_precision_init_val = None

    @property
    def metadata(self) -> Metadata:
        """The description of all but the buffers and the shape."""
        key = self.shared.key
        return self._metadata if key is self._metadata.key else replace(self._metadata, key=key)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every tensor that is held, by a name such as "rowwise_q"; no copies."""
        held = {f"{d}_{name}": getattr(self, d).buffers[name] for d, name in self.metadata.stored}
        preserved = self.high_precision_init_val
        return held if preserved is None else {**held, INIT_VAL: preserved}

    @property
    def fsdp_pre_all_gather(self) -> Callable:
        """The method by which torch's fully_shard asks how a shard is gathered: as codes and scales. UserError for a
        tensor that torch has not cut."""
        if self.sharding is None:
            raise UserError(
                f"fully_shard: the weight held in {self.quantizer} is no part that torch has cut, so that it is not"
                " known how ranks share it"
            )
        gather = partial(self.sharding.pre, self)
        gather.__signature__ = ONE_ARGUMENT
        return gather

    def fsdp_post_all_gather(
        self, received: Sequence[Tensor], told: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Self, list[Tensor]] | None:
        """The method that torch's fully_shard calls with what all ranks sent: it returns the whole tensor, whose dtype
        is `dtype`. After the first time this whole is given as `out`, and filled anew."""
        return self.sharding.post(self, told, dtype, is_first=out is None)

    @classmethod
    def of_whole(cls, buffers: Mapping[str, Tensor], cut: Any, dtype: torch.dtype) -> Self:
        """The tensor that a Cut is of, made of these buffers."""
        return cls(buffers, replace(cut.metadata, dtype=dtype), cut.shape)

    def ready(self, direction: Direction) -> Self:
        """Gather the buffers of a direction where ranks gather them for one pass; returns self."""
        if torch.compiler.is_compiling():
            note_trace()
        elif self.planes is not None:
            self.planes.ready(direction)
        return self

    def view_of(self, buffers: Mapping[str, Tensor], shape: Sequence[int], **changes: Any) -> Self:
        """A tensor of these views of the buffers, with `changes` to the metadata, that shares the key."""
        view = type(self)(buffers, replace(self.metadata, **changes), shape)
        view.shared, view.states, view.sharding, view.planes = self.shared, self.states, self.sharding, self.planes
        if view.shape == self.shape:
            view.part = self.part
        return view

    def __tensor_flatten__(self) -> tuple[list[str], Metadata]:
        return list(self.buffers), self.metadata

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], metadata: Metadata, shape: Any, stride: Any) -> Any:
        return cls(inner, metadata, shape)

    def _stable_hash_for_caching(self) -> str:
        """The text by which torch keys the graphs that it caches; its own hash takes no sizes that are symbols."""
        return stable_hash(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return dispatch(HybridQuantizedTensor, func, args, kwargs or {})

    def describe(self) -> dict[str, Any]:
        """The description of all but the buffers, in text and numbers, from which rebuild() makes an equal tensor."""
        kind = {} if type(self) is HybridQuantizedTensor else {"kind": type(self).__name__}
        return {**self.metadata.describe(), "shape": list(self.shape), **kind}

    def __reduce_ex__(self, protocol: Any) -> tuple:
        self.check_complete()
        return rebuild, (self.buffers, self.describe(), self.requires_grad, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        words = [str(list(self.shape)), str(self.quantizer), f"dtype={self.dtype}", f"device={self.device}"]
        words += [f"{direction}=None" for direction in DIRECTIONS if direction not in self.metadata.directions]
        words += ["requires_grad=True"] if self.requires_grad else []
        return f"{'Parameter of ' if isinstance(self, nn.Parameter) else ''}{type(self).__name__}({', '.join(words)})"

    def encode(self, x: Tensor, key: RngKey | None, part: Part | None) -> HybridOperand:
        """The operands of the directions held, of values in the source dtype that lie in memory as the tensor's do;
        `part` says how ranks share the matrix."""
        meta, options = self.metadata, {"key": key, "states": self.states and self.states.written()}
        wanted = {d: "codes" if d in meta.directions else None for d in DIRECTIONS}
        with for_slot(self.shared.layer, "weight", self.quantizer, x):
            if part is not None:
                return quantize_part(self.quantizer, x, part, **wanted, **options)
            return self.quantizer.quantize(x.reshape(meta.matrix), **wanted, **options)

    def even_part(self, group: ProcessGroup | None) -> Part | None:
        """How ranks of the group share each matrix, for a shard that encode() takes as such a part: of a group only."""
        return None

    def next_key(self, key: RngKey | None) -> RngKey | None:
        """The key of a write that is given this one: by default the step after the last; None where no bits are drawn.
        UserError for none at all."""
        if not self.quantizer.stochastic:
            return None
        last = self.metadata.key
        if key is None and last is None:
            raise UserError(f"quantize: {self.quantizer} rounds stochastically; give key=RngKey(seed=, slot=, step=)")
        return key or replace(last, step=last.step + 1)


KINDS["HybridQuantizedTensor"] = HybridQuantizedTensor


def check_quantized(weight: Any, where: str) -> None:
    """UserError for what is not held quantized, which the function `where` was given."""
    if not isinstance(weight, HybridQuantizedTensor):
        raise UserError(
            f"{where}: got {described(weight)}; it takes weights that are held quantized (HybridQuantizedTensor,"
            " GroupedTensor)"
        )


def described(x: Any) -> str:
    """What a message says of an argument: the dtype and shape of a tensor, or its type."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class _Dequantize(torch.autograd.Function):
    """Forward: the values; backward: the gradient unchanged."""

    @staticmethod
    def forward(ctx, x: HybridQuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        x.check_complete()
        if x.is_meta:
            return torch.empty(x.shape, dtype=dtype, device="meta")
        x.ready("columnwise" if x.rowwise is None else "rowwise")
        if x.rowwise is None and x.quantizer.columnwise.rht:
            raise UserError(
                f"dequantize: columnwise {x.quantizer.columnwise} holds transformed values; keep rowwise too"
            )
        return x.metadata.decode(x.rowwise, x.columnwise, dtype).view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def rebuild(
    buffers: Mapping[str, Tensor], described: Mapping[str, Any], requires_grad: bool = False, parameter: bool = False
) -> HybridQuantizedTensor:
    """A tensor of these buffers and of what describe() said; torch.load(weights_only=True) may call it.

    UserError for buffers that are not those of the formats, and for a quantizer that does not parse.
    """
    cls = KINDS[described.get("kind", HybridQuantizedTensor.__name__)]
    metadata = Metadata.parse(described)
    metadata.check(buffers)
    tensor = cls(buffers, metadata, described["shape"])
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])
