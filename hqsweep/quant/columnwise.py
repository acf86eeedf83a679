"""Columnwise operands, made to the byte from the codes and scales of the rowwise operand.

A distributed optimizer that gathers only rowwise codes needs this. An operand made from the original values cannot be
restored so, unless codes and scales of X.T are the transposed codes and scales of X.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hqsweep.formats import Buffer, Buffers, Format
from hqsweep.formats.elements import pack_nibbles, unpack_nibbles
from hqsweep.memo import memo
from hqsweep.parallel.shards.shard_part import quantize_part
from hqsweep.quant.hybrid import HybridQuantizer


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
