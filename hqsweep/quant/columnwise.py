"""Columnwise operands that are made, to the byte, from the codes and scales of the rowwise ones.

That serves whoever has moved rowwise codes alone, as a distributed optimizer does that gathers one buffer of bytes.
What is made of the original values cannot be made so, unless codes and scales of X.T are those of X, turned.
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
    """Whether the columnwise operand of a quantized tensor follows from its rowwise one: where it is the same matrix
    (of an identity), the decoded rows are what it is made of, rowwise high precision holds the values themselves, or
    codes and scales are turned. It does not under fp8_delayed, whose amax is of other values, nor of a shard or a slice
    whose scale is that of a whole."""
    meta = weight.metadata
    if meta.directions != ("rowwise", "columnwise") or meta.place is not None or meta.shares_scale:
        return False
    if type(weight.quantizer) is not HybridQuantizer or weight.quantizer.columnwise.delayed:
        return False
    return _reads_rows(weight) or _turns(weight.quantizer)


def make_columnwise_(weight: Any) -> None:
    """Overwrite the columnwise operand of a tensor for which follows_rowwise() says yes. The bytes are those that a
    write of both directions gives; of a tensor whose matrix ranks of tp share it may be a collective."""
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
    """Whether the columnwise operand is made of what the rowwise one decodes to."""
    row, source = weight.quantizer.rowwise, weight.source_dtype
    holds = row.high_precision and row.dtype in (source, torch.float32)
    return holds or weight.quantizer.columnwise_source == "rowwise_dequantized"


@memo
def _turns(quantizer: HybridQuantizer) -> bool:
    """Whether codes and scales of X.T are those of X, turned: of one format, with a scale of the tensor or of square
    tiles. 4over6 adds the errors of a tile in an order that turning changes."""
    row, column = quantizer.rowwise, quantizer.columnwise
    square = row.two_d or all(buffer.rows == buffer.cols for name, buffer in row.layout.items() if name != "q")
    return row == column and square and not (row.rht or row.stochastic or row.four_over_six or row.row_scaled)


def _encoded(weight: Any) -> Buffers:
    """The columnwise buffers of one matrix, encoded from the decoded rows under the key of the last write."""
    x, quantizer = weight.rowwise.dequantize(), replace(weight.quantizer, columnwise_source="original")
    if weight.part is not None:
        return quantize_part(quantizer, x, weight.part, columnwise="codes", key=weight.metadata.key).columnwise.buffers
    return quantizer.quantize(x, rowwise=None, columnwise="codes", key=weight.metadata.key).columnwise.buffers


def _turned(buffers: Buffers, format: Format) -> Buffers:
    """The buffers of X.T, from those of X."""
    return {name: _transposed(buffers[name], buffer) for name, buffer in format.layout.items()}


def _transposed(entries: Tensor, buffer: Buffer) -> Tensor:
    if (buffer.rows, buffer.cols) == (1, 2):  # two codes in a byte
        return pack_nibbles(unpack_nibbles(entries).t())
    return entries.t()
