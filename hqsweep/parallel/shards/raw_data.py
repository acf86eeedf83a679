"""Raw data: the bytes of a held weight in memory that someone else owns, such as a distributed optimizer.

Such an optimizer lays the weights of many layers in one flat buffer of bytes. Each rank writes a part of it and gathers
the rest. replace_raw_data moves a weight into the buffer, and post_all_gather_processing makes what was not gathered.
Both have TransformerEngine's names (pytorch/tensor/utils.py), where they only take FP8 in one direction.

Some of these optimizers gather only rowwise codes, so columnwise operands are made from them, to the byte. An operand
made from the original values cannot be restored so, unless codes and scales of X.T are the transposed codes and scales
of X.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffer, Buffers, Format
from hqsweep.formats.elements import pack_nibbles, unpack_nibbles
from hqsweep.memo import memo
from hqsweep.parallel.shards.shard_part import quantize_part
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.tensor import HybridQuantizedTensor, check_quantized, described
from hqsweep.torch_private import storage_id


def follows_rowwise(weight: Any) -> bool:
    """Return whether the rowwise operand determines the columnwise operand of a quantized tensor.

    It does if both are one matrix (an identity), if columns are made from decoded rows, if rowwise high precision holds
    the values, or if codes and scales are transposed. It does not with fp8_delayed, whose amax belongs to other values,
    nor for a shard or slice that shares a scale with the whole.
    """
    meta = weight.metadata
    if meta.directions != ("rowwise", "columnwise") or meta.place is not None or meta.shares_scale:
        return False
    if type(weight.quantizer) is not HybridQuantizer or weight.quantizer.columnwise.delayed:
        return False
    return _reads_rows(weight) or _turns(weight.quantizer)


def make_columnwise_(weight: Any) -> None:
    """Overwrite the columnwise operand from the rowwise operand; follows_rowwise() must hold.

    The bytes are those that a write of both directions gives. If ranks of tp share the matrix, this can be a
    collective.
    """
    if all(direction == "rowwise" for direction, _ in weight.metadata.stored):
        return
    if weight.metadata.content.splits is not None:
        for member in weight.members:
            make_columnwise_(member)
        return
    buffers = _encoded(weight) if _reads_rows(weight) else _turned(weight.rowwise.buffers, weight.quantizer.rowwise)
    for name, buffer in weight.columnwise.buffers.items():
        buffer.copy_(buffers[name])


def _reads_rows(weight: Any) -> bool:
    """Return whether the columnwise operand is made from decoded rows."""
    row, source = weight.quantizer.rowwise, weight.source_dtype
    holds = row.high_precision and row.dtype in (source, torch.float32)
    return holds or weight.quantizer.columnwise_source == "rowwise_dequantized"


@memo
def _turns(quantizer: HybridQuantizer) -> bool:
    """Return whether codes and scales of X.T are the transposed codes and scales of X.

    This needs one format, with a scale per tensor or per square tile. 4over6 is excluded: it adds a tile's errors in an
    order that transposing changes.
    """
    row, column = quantizer.rowwise, quantizer.columnwise
    square = row.two_d or all(buffer.rows == buffer.cols for name, buffer in row.layout.items() if name != "q")
    return row == column and square and not (row.rht or row.stochastic or row.four_over_six or row.row_scaled)


def _encoded(weight: Any) -> Buffers:
    """Return the columnwise buffers of one matrix, encoded from decoded rows under the last write's key."""
    x, quantizer = weight.rowwise.dequantize(), replace(weight.quantizer, columnwise_source="original")
    if weight.part is not None:
        return quantize_part(quantizer, x, weight.part, columnwise="codes", key=weight.metadata.key).columnwise.buffers
    return quantizer.quantize(x, rowwise=None, columnwise="codes", key=weight.metadata.key).columnwise.buffers


def _turned(buffers: Buffers, format: Format) -> Buffers:
    """Return the buffers of X.T from the buffers of X."""
    return {name: _transposed(buffers[name], buffer) for name, buffer in format.layout.items()}


def _transposed(entries: Tensor, buffer: Buffer) -> Tensor:
    if (buffer.rows, buffer.cols) == (1, 2):  # two codes in a byte
        return pack_nibbles(unpack_nibbles(entries).t())
    return entries.t()


ALIGNED = 16
"""Each buffer begins at a multiple of this number of bytes."""


class RawSizes(NamedTuple):
    """The sizes in bytes of the raw data that replace_raw_data() takes for a weight."""

    codes: int
    """The first buffer alone: the rowwise codes, or the columnwise codes where only these are held."""
    all: int
    """All buffers: rowwise codes and scales, then columnwise ones, each padded to a multiple of 16 bytes."""


def raw_data_sizes(weight: HybridQuantizedTensor) -> RawSizes:
    """The sizes in bytes of a weight's raw data: its codes [rows, cols * bits / 8] alone, and all of its buffers.

    With buffers of b_1, b_2, ... bytes, in the order of weight.buffers, these are b_1, and the sum of the b_i, each
    rounded up to a multiple of 16. UserError for a tensor that is not held quantized.
    """
    check_quantized(weight, "raw_data_sizes")
    sizes = [_nbytes(buffer) for _, buffer in _held(weight)]
    return RawSizes(sizes[0], sum(map(_padded, sizes)))


def replace_raw_data(tensor: HybridQuantizedTensor, new_raw_data: Tensor) -> None:
    """Move a weight's bytes into other memory, which holds them from now on. Values, key and states stay.

    tensor: a HybridQuantizedTensor or GroupedTensor in any formats. new_raw_data: uint8, contiguous, of any shape, on
    the weight's device, at an address that 16 divides. Its size says what moves (raw_data_sizes):
    - The codes alone, as in TransformerEngine: row r begins at byte r * cols * bits / 8. Scales and the other operand
      stay.
    - All buffers: the i-th begins at byte padded(b_1) + ... + padded(b_(i-1)), so equal bytes mean an equal weight.

    Later writes (quantize_, an optimizer's step) go to that memory, and whatever is written there becomes the weight's.
    Earlier views, CUDA graphs and other tensors of the same memory keep the old memory. So call it on the parameter
    itself, before a model is wrapped or captured.

    UserError for another dtype, size, device or address, for a weight that fully_shard has cut or gathered, and for a
    weight without memory.
    """
    check_quantized(tensor, "replace_raw_data")
    _check_memory(tensor)
    sizes = raw_data_sizes(tensor)
    _check_buffer(tensor, new_raw_data, sizes)
    flat, held = new_raw_data.detach().view(-1), _held(tensor)
    moves = held if flat.numel() == sizes.all else held[:1]
    if any(storage_id(buffer) == storage_id(flat) for _, buffer in moves):
        moves = [(name, buffer.clone()) for name, buffer in moves]  # the places may overlap
    starts, views = accumulate((_padded(_nbytes(buffer)) for _, buffer in moves), initial=0), {}
    with torch.no_grad():
        for (name, buffer), start in zip(moves, starts, strict=False):
            views[name] = flat[start : start + _nbytes(buffer)].view(buffer.dtype).view(buffer.shape)
            views[name].copy_(buffer)
    tensor.hold({**tensor.buffers, **views})
    tensor.shared.moved = "all" if len(moves) == len(held) else "codes"


def post_all_gather_processing(weights: Iterable[HybridQuantizedTensor]) -> None:
    """Make the columnwise operands of weights whose raw data was gathered, with the bytes of a write of the whole.

    weights: any iterable of HybridQuantizedTensor or GroupedTensor. Their rowwise codes were gathered, and
    quantize_master_weights has written the rowwise scales on every rank. Where the columnwise operand follows from
    these, it is made under the key of the last write:

        columnwise = encode(decode(rowwise).T)      for @rowwise_dequantized, and rowwise high precision
        columnwise = rowwise codes and scales, transposed      for one format per tensor or in square tiles

    Members of groups are made one by one, and a second call gives the same bytes. Nothing is made where all raw data
    was moved and gathered, and where one direction is held.

    UserError, before anything is written, for a columnwise operand that is made from the original values, such as of
    "nvfp4|mxfp8". Have all raw data of such a weight gathered, or let quantize_master_weights write it whole.
    """
    if isinstance(weights, Tensor) or not isinstance(weights, Iterable):
        raise UserError(f"post_all_gather_processing: got {described(weights)}; it takes a sequence of weights")
    weights = list(weights)
    for index, weight in enumerate(weights):
        check_quantized(weight, "post_all_gather_processing")
        if not (_is_complete(weight) or follows_rowwise(weight)):
            raise UserError(
                f"post_all_gather_processing: the columnwise operand of weight {index}, held in {weight.quantizer},"
                " does not follow from its rowwise codes; have replace_raw_data move all its"
                f" {raw_data_sizes(weight).all} bytes, or leave the weight out, as quantize_master_weights writes it"
            )
    with torch.no_grad():
        for weight in weights:
            if not _is_complete(weight):
                make_columnwise_(weight)
            weight.shared.is_partial = False
            torch.autograd.graph.increment_version(weight)


def _is_complete(weight: HybridQuantizedTensor) -> bool:
    """Whether the raw data was all that the weight holds."""
    return weight.shared.moved == "all" or len(weight.metadata.directions) == 1


def _held(weight: HybridQuantizedTensor) -> list[tuple[str, Tensor]]:
    """(name, tensor) of each buffer, codes of the first direction first."""
    buffers = weight.buffers
    return [(name, buffers[name]) for name in (f"{direction}_{name}" for direction, name in weight.metadata.stored)]


def _nbytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _check_memory(tensor: HybridQuantizedTensor) -> None:
    if tensor.sharding is not None or tensor.planes is not None:
        raise UserError(
            f"replace_raw_data: the weight held in {tensor.quantizer} is one that torch's fully_shard has cut or"
            " gathered, which keeps its memory itself; call it on whole weights"
        )
    for name, buffer in _held(tensor):
        if not tensor.is_meta and buffer.untyped_storage().nbytes() < _nbytes(buffer):
            raise UserError(f"replace_raw_data: {name} of the weight held in {tensor.quantizer} has no memory")


def _check_buffer(tensor: HybridQuantizedTensor, new: Any, sizes: RawSizes) -> None:
    if not isinstance(new, Tensor):
        raise UserError(f"replace_raw_data: new_raw_data is {described(new)}; it takes a tensor of uint8")
    if (new.dtype, new.device) != (torch.uint8, tensor.device) or new.numel() not in sizes:
        raise UserError(
            f"replace_raw_data: got {new.numel()} entries of {new.dtype} on {new.device} for a weight"
            f" {list(tensor.shape)} held in {tensor.quantizer}; it takes uint8 on {tensor.device}, {sizes.codes} bytes"
            f" for its codes, or {sizes.all} for all that it holds"
        )
    if not new.is_contiguous() or (not new.is_meta and new.data_ptr() % ALIGNED):
        raise UserError(
            f"replace_raw_data: new_raw_data {list(new.shape)} of strides {new.stride()} is not contiguous memory that"
            f" begins at a multiple of {ALIGNED} bytes"
        )
