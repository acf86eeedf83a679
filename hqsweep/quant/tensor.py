"""HybridQuantizedTensor: a parameter held only as its two quantized operands.

It is a torch.Tensor with a logical shape and dtype, so that modules, optimizers and checkpoints treat it as a weight.
Its value is the decoded operands. Operations that keep the operands (views, copies, moves) return the same type. All
others read dequantize(), and in-place ones quantize their result (quant/tensor_ops.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.shards.shard_agree import quantize_shards_
from hqsweep.parallel.shards.shard_part import Part, quantize_part
from hqsweep.quant.content import Content, OneMatrix
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.quant.tensor_protocol import Shared, TensorProtocol
from hqsweep.quant.usage import Directions, Metadata
from hqsweep.torch_private import make_wrapper_subclass, refuse_data_ptr

INIT_VAL = "high_precision_init_val"
KINDS: dict[str, type] = {}
"""Class name of a quantized tensor, as stored in files -> class."""


class HybridQuantizedTensor(Directions, TensorProtocol):
    """The quantized operands of a tensor [..., cols]; make it with quantize() or empty().

    rowwise encodes [rows, cols] (leading axes folded), columnwise its transpose. A direction that is not held is None.
    """

    quantizer: HybridQuantizer
    rowwise: Operand | None
    columnwise: Operand | None
    states: SlotStates | None
    """The states of the tensor's slot, for fp8_delayed; views share them, copies have none."""
    high_precision_init_val: Tensor | None
    """The value kept by preserve_high_precision_init_val, on the CPU."""

    sharding: Any
    """How ranks gather the tensor (Sharding), for a part cut along the first axis, and for the tensor that was cut.

    Views and copies have it, too.
    """
    planes: Any
    """The Sharding of a whole that torch's fully_shard has gathered. It knows which buffers are present."""
    part: Part | None
    """How ranks share the matrix that contains the tensor, or each member (parallel.shards.shard_part).

    A shard of such a part has it, too; its metadata's place is then relative to the part.
    """

    content_type: type[Content] = OneMatrix
    """The content class of tensors of this class."""

    @staticmethod
    def __new__(cls, buffers: Mapping[str, Tensor], metadata: Metadata, shape: Sequence[int]) -> Self:
        device = next(buffers[f"{direction}_{name}"].device for direction, name in metadata.stored)
        options = {"dtype": metadata.dtype, "device": device, "storage_size": 0}
        self = make_wrapper_subclass(cls, tuple(shape), **options)
        refuse_data_ptr(self)  # DLPack would read at address 0, and end the process
        self._metadata, self.shared = metadata, Shared(metadata.key)
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
        """Return a tensor with uninitialised buffers on any device, also meta.

        shape: [..., cols]. For a GroupedTensor [E, N, K], or each member's [m_e, k_e]: the group is flat if these
        differ, else [E, m, k]. place: the tensor is a shard, whose operands encode its cover (Place.cover_area).
        UserError for a shape that a format cannot hold.
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
        """Return the quantized form of x [..., cols] (bf16, fp16 or fp32), with x's shape and dtype, in new memory.

        x is rounded to source_dtype (default: its own) first. key: stream of +sr. states: of fp8_delayed; the tensor
        keeps them. preserve_high_precision_init_val: keep a copy of x on the CPU, from which an optimizer starts its
        masters. Later writes update the copy. UserError for a shape that a format cannot hold, +sr without a key, and
        fp8_delayed without states.
        """
        options = {"dtype": x.dtype, "source_dtype": source_dtype, "device": x.device, "directions": directions}
        keep = {"key": key, "states": states, "preserve": preserve_high_precision_init_val}
        return cls.empty(x.shape, quantizer, **options).begin_with(x, **keep)

    def begin_with(self, x: Tensor, *, key: RngKey | None, states: Any, preserve: bool) -> Self:
        """Write values into an empty tensor, keep what `quantize` says, and return self."""
        self.states = states
        self.quantize_(x, key=key)
        if preserve:
            self.high_precision_init_val = x.detach().clone() if x.is_meta else x.detach().to("cpu", copy=True)
        return self

    def quantize_(
        self,
        x: Tensor | Sequence[Tensor],
        *,
        key: RngKey | None = None,
        group: ProcessGroup | None = None,
        noop_flag: Tensor | None = None,
    ) -> Self:
        """Overwrite the held directions in place with the quantized form of x, and return self.

        x: of self's shape, in any floating dtype; for a group also one tensor per member. key: stream of +sr; default:
        the last key's next step. A shard takes its own part of x. group: the process group whose ranks hold the whole
        and all make this call (quantize_shards_); default: the group that gathers the shard. noop_flag: a number [1];
        nothing is written unless it is 0, for which the host waits.
        UserError for another shape, +sr without any key, a part that shares its scale with a whole, and a shard without
        group.
        """
        if noop_flag is not None and noop_flag.item():
            return self
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
        """Return the plain values to write, and the key to quantize them with. UserError as for quantize_()."""
        x = x if isinstance(x, Tensor) else self.metadata.content.joined(x).view(self.shape)
        if tuple(x.shape) != tuple(self.shape):
            raise UserError(f"quantize_: got {tuple(x.shape)} for a tensor of shape {tuple(self.shape)}")
        if x.is_complex():
            raise UserError(f"quantize_: got {x.dtype}, whose imaginary parts would be lost; give its real part")
        self.check_writable()
        with torch.no_grad():
            return (x.dequantize() if isinstance(x, HybridQuantizedTensor) else x), self.next_key(key)

    def end_write(self, operands: Any, x: Tensor, key: RngKey | None) -> Self:
        """Take the operands of x, made under this key, and return self. operands: None on the meta device or without
        elements."""
        with torch.no_grad():
            if operands is not None:
                self.write_(operands)
            if self.high_precision_init_val is not None:
                self.high_precision_init_val.copy_(x)
        return self.note_write(key)

    def note_write(self, key: RngKey | None) -> Self:
        """Record, also for autograd, that the bytes have changed and which key drew them; return self."""
        torch.autograd.graph.increment_version(self)
        self.shared.writes[0] += 1
        return self.set_key(key)

    @property
    def source_dtype(self) -> torch.dtype:
        """Values are rounded to this dtype before they are quantized."""
        return self._metadata.source_dtype

    def set_key(self, key: RngKey | None) -> Self:
        """Record, for all views, the key that drew the present bytes; return self."""
        self.shared.key = key
        return self

    def write_(self, operands: Any) -> None:
        """Copy the held directions' buffers from operands of an equal quantizer."""
        for own, buffer in self.copies(operands):
            own.copy_(buffer)
        self.shared.is_partial = False
        self.shared.writes[0] += 1

    def copies(self, operands: Any) -> list[tuple[Tensor, Tensor]]:
        """Return (own buffer, source buffer) pairs for write_()."""
        stored = self.metadata.stored
        return [(self.held(d).buffers[name], getattr(operands, d).buffers[name]) for d, name in stored]

    def check_writable(self) -> None:
        """Raise UserError for a part whose scale belongs to the whole tensor."""
        if self.metadata.shares_scale:
            raise UserError(
                f"a slice of a tensor in {self.quantizer} shares its scale with the rest and cannot be written alone;"
                " write the whole tensor"
            )

    def check_complete(self) -> None:
        """Raise UserError while other ranks' rows are missing: a reader would get their old codes."""
        if self.shared.is_partial:
            raise UserError(
                f"the weight held in {self.quantizer} has the rows of this rank's masters alone: gather its raw data,"
                " and call hqsweep.quant.post_all_gather_processing"
            )

    def hold(self, buffers: Mapping[str, Tensor]) -> None:
        """Take these tensors as the buffers of both operands, by name. Existing views keep the old buffers."""
        self.alone = {}
        for name, buffer in buffers.items():
            setattr(self, name, buffer)  # __tensor_flatten__ names these attributes
        for direction in DIRECTIONS:
            setattr(self, direction, self._metadata.operand(buffers, direction))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor of dtype (default: own dtype), from the rowwise operand if it is held.

        Gradients pass unchanged. UserError if only a columnwise operand under the Hadamard transform is held.
        """
        return _Dequantize.apply(self, dtype or self.dtype)

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return high_precision_init_val, under TransformerEngine's name."""
        return self.high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the value kept by preserve_high_precision_init_val."""
        self.high_precision_init_val = None

    def own_states(self, states: Any) -> Any:
        """Return the states of this tensor's matrices, out of the DelayedStates or ExpertStates of its module."""
        return states

    @property
    def metadata(self) -> Metadata:
        """The description apart from buffers and shape."""
        key = self.shared.key
        return self._metadata if key is self._metadata.key else replace(self._metadata, key=key)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every held tensor by name, such as "rowwise_q"; no copies."""
        held = {f"{d}_{name}": self.held(d).buffers[name] for d, name in self.metadata.stored}
        preserved = self.high_precision_init_val
        return held if preserved is None else {**held, INIT_VAL: preserved}

    def view_of(self, buffers: Mapping[str, Tensor], shape: Sequence[int], **changes: Any) -> Self:
        """Return a tensor of these buffer views that shares the key. changes: to the metadata."""
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

    def describe(self) -> dict[str, Any]:
        """Return the description apart from buffers, as text and numbers; rebuild() makes an equal tensor from it."""
        kind = {} if type(self) is HybridQuantizedTensor else {"kind": type(self).__name__}
        return {**self.metadata.describe(), "shape": list(self.shape), **kind}

    def __reduce_ex__(self, protocol: Any) -> tuple:
        self.check_complete()
        return rebuild, (self.buffers, self.describe(), self.requires_grad, isinstance(self, nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        words = [str(list(self.shape)), str(self.quantizer), f"dtype={self.dtype}", f"device={self.device}"]
        words += [f"{direction}=None" for direction, held in self.get_usages().items() if not held]
        words += ["requires_grad=True"] if self.requires_grad else []
        return f"{'Parameter of ' if isinstance(self, nn.Parameter) else ''}{type(self).__name__}({', '.join(words)})"

    def encode(self, x: Tensor, key: RngKey | None, part: Part | None) -> HybridOperand:
        """Return the operands of the held directions, for values in the source dtype with the tensor's memory layout.

        part: how ranks share the matrix.
        """
        meta, options = self.metadata, {"key": key, "states": self.states and self.states.written()}
        wanted = {d: "codes" if d in meta.directions else None for d in DIRECTIONS}
        with for_slot(self.shared.layer, "weight", self.quantizer, x):
            if part is not None:
                return quantize_part(self.quantizer, x, part, **wanted, **options)
            return self.quantizer.quantize(x.reshape(meta.matrix), **wanted, **options)

    def even_part(self, group: ProcessGroup | None) -> Part | None:
        """Return how ranks of the group share each matrix, for a shard that encode() takes as a part: for groups
        only."""
        return None

    def next_key(self, key: RngKey | None) -> RngKey | None:
        """Return the key of a write: the given one, else the last key's next step; None if no bits are drawn.

        UserError if neither exists.
        """
        if not self.quantizer.stochastic:
            return None
        last = self.metadata.key
        if key is None and last is None:
            raise UserError(f"quantize: {self.quantizer} rounds stochastically; give key=RngKey(seed=, slot=, step=)")
        return key or replace(last, step=last.step + 1)


KINDS["HybridQuantizedTensor"] = HybridQuantizedTensor


def check_quantized(weight: Any, where: str) -> None:
    """Raise UserError if an argument of the function `where` is not a quantized tensor."""
    if not isinstance(weight, HybridQuantizedTensor):
        raise UserError(
            f"{where}: got {described(weight)}; it takes weights that are held quantized (HybridQuantizedTensor,"
            " GroupedTensor)"
        )


def described(x: Any) -> str:
    """Return dtype and shape of a tensor, or the type of another argument, for messages."""
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class _Dequantize(torch.autograd.Function):
    """Forward: the values. Backward: the gradient unchanged."""

    @staticmethod
    def forward(ctx, x: HybridQuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        x.check_complete()
        if x.is_meta:
            return torch.empty(x.shape, dtype=dtype, device="meta")
        first = x.metadata.directions[0]
        x.ready(first)
        x.held(first)
        if x.rowwise is None and x.quantizer.columnwise.rht:
            raise UserError(
                f"dequantize: columnwise {x.quantizer.columnwise} holds transformed values; keep rowwise too"
            )
        if x.rowwise is not None and x.quantizer.rowwise.rht:
            raise UserError(
                f"dequantize: rowwise {x.quantizer.rowwise} holds transformed values; a tensor held as codes takes a"
                " rowwise format without +rht"
            )
        return x.metadata.decode(x.rowwise, x.columnwise, dtype).view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def rebuild(
    buffers: Mapping[str, Tensor], described: Mapping[str, Any], requires_grad: bool = False, parameter: bool = False
) -> HybridQuantizedTensor:
    """Return a tensor with these buffers and describe()'s description; torch.load(weights_only=True) may call it.

    UserError for buffers that do not fit the formats, and for a quantizer that does not parse.
    """
    cls = KINDS[described.get("kind", HybridQuantizedTensor.__name__)]
    metadata = Metadata.parse(described)
    metadata.check(buffers)
    tensor = cls(buffers, metadata, described["shape"])
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])
