"""Operations that keep a HybridQuantizedTensor quantized; tensor_protocol.py has the rule for all others.

A part that the formats cannot hold raises UserError, because writes to its values would be lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.parallel.shards.fsdp2 import with_sharding
from hqsweep.parallel.shards.shard import Cut
from hqsweep.parallel.wire.local import first_broadcast
from hqsweep.quant.content import OneMatrix
from hqsweep.quant.operand import has_whole_entries, narrow
from hqsweep.quant.tensor import INIT_VAL, HybridQuantizedTensor
from hqsweep.quant.tensor_protocol import implements
from hqsweep.torch_private import (
    disabled_torch_function,
    make_wrapper_subclass,
    pin_memory,
    to_copy,
    tree_map,
    unsafe_view,
)

aten = torch.ops.aten


class Blank(torch.Tensor):
    """Zeros in the padded shape of a shard of `like`, a tensor with a sharding.

    A shard that is copied into any view becomes the value of all views. All other uses see zeros in like's formats.
    """

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, like: HybridQuantizedTensor, shape: Any, held: list, **options: Any) -> "Blank":
        self = make_wrapper_subclass(cls, torch.Size(shape), **options)
        self.like, self.held = like, held
        return self

    def view_as_shape(self, shape: Any) -> "Blank":
        """Return a view of another shape."""
        return Blank(self.like, shape, self.held, dtype=self.dtype, device=self.device)

    def value(self) -> Tensor:
        """Return the value: the copied shard, or zeros in like's formats."""
        if not self.held:
            like, meta = self.like, self.like.metadata
            options = {"dtype": self.dtype, "source_dtype": meta.source_dtype, "directions": meta.directions}
            zeros = type(like).empty(self.shape, like.quantizer, device=self.device, **options)
            zeros.quantize_(torch.zeros(self.shape, dtype=self.dtype, device=self.device), key=meta.key)
            self.held.append(zeros)
        return self.held[0]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if isinstance(args[0], cls) and func in _HANDLERS:
            return _HANDLERS[func](*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.value() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _view(x: Blank, size: list[int]) -> Blank:
    return x.view_as_shape(torch.empty(x.shape, device="meta").view(size).shape)


def _slice(x: Blank, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    (start, stop, step), cut = slice(start, end, step).indices(x.shape[dim]), x.like.sharding.cut
    if (dim, start, step) != (cut.dim, 0, 1):
        return x.value()[(slice(None),) * dim + (slice(start, stop, step),)]
    if x.held and x.held[0].shape[dim] == stop:
        return x.held[0].detach()
    return _empty_shard(x) if stop == 0 else x.view_as_shape(cut.shape_of(stop))


def _empty_shard(x: Blank) -> HybridQuantizedTensor:
    like, cut = x.like, x.like.sharding.cut
    end = cut.shape[cut.dim]
    metadata = replace(cut.part(end, end), dtype=x.dtype, key=like.metadata.key)
    shard = type(like)(metadata.empty(x.device), metadata, cut.shape_of(0))
    shard.sharding, shard.states, shard.part = like.sharding, like.states, like.part
    if like.shape == shard.shape:  # the padded shard itself: torch copies nothing into it
        shard.shared = like.shared
    return shard


def _copy_(x: Blank, source: Tensor, non_blocking: bool = False) -> Blank:
    if isinstance(source, HybridQuantizedTensor) and source.sharding is x.like.sharding and source.shape == x.shape:
        shard = source.clone()
        shard.states = source.states
        shard.shared = source.shared  # keep the exchange, as ranks without padding do
        x.held[:] = [shard]
    else:
        x.value().copy_(source)
    return x


def _moved(func: Any) -> Any:
    def move(x: Blank, *args: Any, **options: Any) -> Blank:
        held = [func(value, *args, **options) for value in x.held]
        device = options.get("device") or x.device
        return Blank(x.like, x.shape, held, dtype=options.get("dtype") or x.dtype, device=device)

    return move


_HANDLERS = {
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.copy_.default: _copy_,
    aten.detach.default: lambda x: x.view_as_shape(x.shape),
    to_copy.default: _moved(to_copy.default),
    pin_memory.default: _moved(pin_memory.default),
}


aten = torch.ops.aten


@implements(aten.detach.default, aten.alias.default)
def _alias(x: HybridQuantizedTensor) -> HybridQuantizedTensor:
    return x.view_of(x.buffers, x.shape)


@implements(aten.view.default, unsafe_view.default)
def _view(x: HybridQuantizedTensor, size: list[int]) -> HybridQuantizedTensor:
    """Return the operands under another logical shape with equally many elements."""
    shape = torch.empty(x.shape, device="meta").view(size).shape
    x.metadata.content.check_view(shape)
    buffers = x.buffers
    if INIT_VAL in buffers:
        buffers[INIT_VAL] = buffers[INIT_VAL].view(shape)
    return x.view_of(buffers, shape)


@implements(aten.as_strided.default)
def _as_strided(x: HybridQuantizedTensor, size: list[int], stride: list[int], offset: int | None = None) -> Any:
    """Return all of a contiguous tensor, as FSDP2 asks for it. UserError for any other part."""
    whole = torch.empty(size, device="meta")
    if offset or whole.numel() != x.numel() or tuple(stride) != whole.stride():
        raise UserError(
            f"as_strided of a quantized tensor takes all of its {x.numel()} elements in order, not size {list(size)},"
            f" stride {list(stride)}, offset {offset or 0}; use dequantize()"
        )
    return _view(x, size)


@implements(aten.slice.Tensor)
def _slice(
    x: HybridQuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> HybridQuantizedTensor:
    """Return rows (dim 0) or columns (dim -1) start to end, as views. UserError for a cut inside a block, and for other
    axes."""
    size = x.shape[dim]
    start, stop, _ = slice(start, end).indices(size)
    stop = max(start, stop)
    if (start, stop, step) == (0, size, 1):
        return _alias(x)
    axis = _matrix_axis(x, dim)
    if step != 1:
        raise UserError(f"slice of a quantized tensor with step {step}; it takes step 1, or slice dequantize()")
    factor = x.metadata.matrix[0] // x.shape[0] if axis == 0 else 1
    parts, shares = {}, x.metadata.shares_scale
    for direction in x.metadata.directions:
        operand, along = getattr(x, direction), axis if direction == "rowwise" else 1 - axis
        part = narrow(operand, along, start * factor, stop * factor)
        shares = shares or has_whole_entries(operand, along)
        parts[direction] = part.buffers
    buffers = {f"{direction}_{name}": parts[direction][name] for direction, name in x.metadata.stored}
    if x.high_precision_init_val is not None:
        buffers[INIT_VAL] = x.high_precision_init_val.narrow(dim, start, stop - start)
    shape = list(x.shape)
    shape[dim] = stop - start
    rows, cols = x.metadata.matrix
    matrix = (rows, stop - start) if axis else ((stop - start) * factor, cols)
    return x.view_of(buffers, shape, content=OneMatrix(matrix=matrix), shares_scale=shares)


def _matrix_axis(x: HybridQuantizedTensor, dim: int) -> int:
    """Return 0 for rows, 1 for columns of the encoded matrix."""
    dim, cols = dim % x.dim(), x.metadata.matrix[1]
    if x.shape == (cols,):
        return 1
    if x.shape[-1] != cols or dim not in (0, x.dim() - 1) or x.dim() < 2:
        raise UserError(
            f"slice along axis {dim} of a quantized tensor of shape {tuple(x.shape)}; its first and last axis can be"
            f" sliced, in its own shape [..., {cols}]; use dequantize()"
        )
    return int(dim == x.dim() - 1)


@implements(aten.split.Tensor)
def _split(x: HybridQuantizedTensor, size: int, dim: int = 0) -> list[HybridQuantizedTensor]:
    """Return the parts along the first or last axis as shards, which may cut blocks.

    A shard's buffers are views of all entries that its rows, or columns, read. Parts of one row are slices.
    """
    if x.dim() == 1 and size:
        return [_slice(x, dim, start, start + size) for start in range(0, len(x), size)]
    cut = Cut.of(x.metadata, x.shape, size, dim)
    _matrix_axis(x, dim)  # refuses inner axes
    starts = range(0, max(x.shape[dim], 1), max(size, 1))
    spans = [(start, min(start + size, x.shape[dim])) for start in starts]
    return with_sharding(x, [_shard(x, cut, *span) for span in spans], cut)


def _shard(x: HybridQuantizedTensor, cut: Cut, start: int, stop: int) -> HybridQuantizedTensor:
    """Return the shard of rows, or columns, start to stop."""
    meta = x.metadata
    part, buffers, shares = cut.part(start, stop), {}, meta.shares_scale
    for direction in meta.directions:
        operand, along = getattr(x, direction), cut.along(direction)
        before = 0 if meta.place is None else cut.covered(meta, direction)[0]
        first, last = cut.covered(part, direction)
        own = narrow(operand, along, first - before, last - before)
        shares = shares or has_whole_entries(operand, along) or last - first != part.matrix[cut.axis]
        buffers |= {f"{direction}_{name}": own.buffers[name] for d, name in meta.stored if d == direction}
    if x.high_precision_init_val is not None:
        buffers[INIT_VAL] = x.high_precision_init_val.narrow(cut.dim, start, stop - start)
    changes = {"content": part.content, "place": part.place, "shares_scale": shares}
    shard = x.view_of(buffers, cut.shape_of(stop - start), **changes)
    shard.part = x.part
    return shard


@implements(aten.split_with_sizes.default)
def _split_with_sizes(x: HybridQuantizedTensor, sizes: list[int], dim: int = 0) -> list[HybridQuantizedTensor]:
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(x, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


@implements(aten.select.int, aten.unbind.int)
def _no_part(x: HybridQuantizedTensor, *_: Any) -> None:
    raise UserError(
        f"one row or column of a tensor in {x.quantizer} cannot be held by itself; index dequantize(), or write the"
        " whole tensor"
    )


@implements(aten.clone.default)
def _clone(x: HybridQuantizedTensor, *, memory_format: Any = None) -> HybridQuantizedTensor:
    return _copied(x, lambda buffer: buffer.clone(memory_format=torch.contiguous_format))


@implements(to_copy.default)
def _to_copy(x: HybridQuantizedTensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Return the tensor on another device with the same bytes. Another floating dtype changes only the logical
    dtype."""
    if dtype is not None and not dtype.is_floating_point:
        return to_copy.default(x.dequantize(), dtype=dtype, **options)
    device, non_blocking = options.get("device") or x.device, options.get("non_blocking", False)

    def moved(buffer: Tensor) -> Tensor:
        return buffer.to(device, non_blocking=non_blocking, copy=True, memory_format=torch.contiguous_format)

    return _copied(x, moved, dtype=dtype or x.dtype)


def _copied(x: HybridQuantizedTensor, copy: Callable[[Tensor], Tensor], **changes: Any) -> HybridQuantizedTensor:
    """Return a tensor with its own buffers; a preserved value stays on the CPU."""
    x.check_complete()
    buffers = {name: buffer.clone() if name == INIT_VAL else copy(buffer) for name, buffer in x.buffers.items()}
    copied = type(x)(buffers, replace(x.metadata, shares_scale=False, **changes), x.shape)
    copied.sharding, copied.part, copied.shared.layer = x.sharding, x.part, x.shared.layer
    return copied


@implements(aten.copy_.default)
def _copy_(x: HybridQuantizedTensor, source: Tensor, non_blocking: bool = False) -> HybridQuantizedTensor:
    """Copy the bytes of a tensor with the same quantizer, or else quantize the values; return x.

    For a broadcast of DistributedDataParallel the bytes are sent instead of decoded values, so nothing is quantized
    again.
    """
    quantized = isinstance(source, HybridQuantizedTensor)
    same = quantized and source.quantizer == x.quantizer
    same = same and set(x.metadata.directions) <= set(source.metadata.directions)
    broadcast = first_broadcast()
    if broadcast is not None:
        return _broadcast(x, *broadcast)
    if not same or not _lie_alike(x, source):
        # torch's dispatcher leaves the negative bit to copy_.
        return x.quantize_((source.dequantize() if quantized else source.resolve_neg()).expand(x.shape))
    x.check_writable()
    source.check_complete()
    if all(own.is_set_to(buffer) for own, buffer in x.copies(source)):
        return x  # for example a model that loads its own state_dict
    x.write_(source)
    preserved = x.high_precision_init_val
    if preserved is not None:
        values = source.high_precision_init_val
        preserved.copy_((source.dequantize() if values is None else values).view(preserved.shape))
    x.set_key(source.metadata.key)
    return x


def _broadcast(x: HybridQuantizedTensor, group: Any, source: int) -> HybridQuantizedTensor:
    """Broadcast one rank's operands and preserved initial value to the group."""
    preserved = x.high_precision_init_val
    for tensor in (*x.buffers.values(), *(() if preserved is None else (preserved,))):
        own = tensor.to(x.device).reshape(-1).contiguous()
        dist.broadcast(own.view(torch.uint8), group=group, group_src=source)
        tensor.copy_(own.view(tensor.shape))
    x.shared.writes[0] += 1
    return x


def _lie_alike(x: HybridQuantizedTensor, other: HybridQuantizedTensor) -> bool:
    """Return whether two tensors of one quantizer have buffers of equal shapes and, as parts, the same place in a
    whole."""
    meta, own = other.metadata, x.metadata
    places = {meta.place, own.place} - {None}
    if meta.content.extent != own.content.extent or len(places) > 1:
        return False
    return all(meta.buffer(*name) == own.buffer(*name) for name in own.stored)


@implements(aten.empty_like.default)
def _empty_like(x: HybridQuantizedTensor, *, dtype: Any = None, device: Any = None, **_: Any) -> HybridQuantizedTensor:
    """Return the tensor that Module.to_empty makes from a meta parameter. It preserves an initial value if x does."""
    metadata = replace(x.metadata, dtype=dtype or x.dtype, shares_scale=False)
    empty = type(x)(metadata.empty(device or x.device), metadata, x.shape)
    empty.sharding, empty.part = x.sharding, x.part
    if x.high_precision_init_val is not None:
        device = "meta" if empty.is_meta else "cpu"
        empty.high_precision_init_val = torch.empty_like(x.high_precision_init_val, device=device)
    return empty


@implements(aten.new_zeros.default)
def _new_zeros(x: HybridQuantizedTensor, size: list[int], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """Return zeros in the same formats, without random bits.

    They are a plain tensor if the formats cannot hold the shape or dtype. For a shard's shape of a tensor that
    fully_shard has cut, they are a Blank.
    """
    if x.sharding is not None and (*size,) == x.sharding.cut.shape_of(x.sharding.cut.each):
        return Blank(x, size, [], dtype=dtype or x.dtype, device=device or x.device)
    shape = x.metadata.content.empty_shape(size)
    if shape is None or not (dtype or x.dtype).is_floating_point:
        return torch.zeros(size, dtype=dtype or x.dtype, device=device or x.device)
    zeros = _empty(x, shape, dtype, device)
    zeros.quantize_(torch.zeros(size, dtype=zeros.dtype, device=zeros.device), key=RngKey(seed=0, slot="", step=0))
    return zeros.set_key(x.metadata.key)


def _empty(x: HybridQuantizedTensor, size: Sequence[Any], dtype: Any, device: Any) -> HybridQuantizedTensor:
    meta = x.metadata
    return type(x).empty(
        size,
        x.quantizer,
        dtype=dtype or x.dtype,
        source_dtype=meta.source_dtype,
        device=device or x.device,
        directions=meta.directions,
        key=meta.key,
    )
