"""Token rows as codes with their scales, one message of bytes per row: experts over ranks send these in place of
bfloat16.

A rowwise operand can be sent this way if every code and scale belongs to one row. An amax of the whole matrix is
allowed; ranks agree on it first. The receiver makes the columnwise operand from decoded codes alone. A recipe that
makes it from the original values is not sent as codes, unless no product reads that operand.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hqsweep.formats import WHOLE, Format
from hqsweep.memo import memo
from hqsweep.ops.members.layout import GroupLayout
from hqsweep.ops.members.splits import Splits
from hqsweep.ops.quantize.amax import Search, find_amax
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import Operand

PITCH = 16
"""The bytes of a message are a multiple of this: copies of whole rows are fast then."""
SENT = "tokens for experts of other ranks"
"""The layer name in their slot (ops.quantize.nonfinite)."""


@memo
def sends_codes(quantizer: HybridQuantizer, columnwise: bool) -> bool:
    """Return whether rows can travel as codes: the receiver gets the operands that the quantizer makes from the rows'
    values.

    columnwise: whether a product reads the columnwise operand, too.
    """
    format = quantizer.rowwise
    drawn = format.stochastic or format.delayed or format.rht > 0
    if type(quantizer) is not HybridQuantizer or format.high_precision or drawn:
        return False
    if columnwise and quantizer.columnwise_source != "rowwise_dequantized":
        return False
    return all(buffer.rows == 1 or name == format.amax_name for name, buffer in format.layout.items())


@memo
def _both(format: Format) -> HybridQuantizer:
    """Return a quantizer with this rowwise format."""
    return HybridQuantizer(format, format.columnwise_form)


@dataclass(frozen=True, kw_only=True, eq=False)
class Messages:
    """Encoded rows of the experts' matrices, and the buffers that rows of an expert share."""

    format: Format
    width: int
    dtype: torch.dtype
    rows: Tensor
    """uint8 [rows, bytes]: codes and scales of each row, one buffer of the format after the other."""
    common: Mapping[str, Tensor]
    """Buffers with one entry for each expert."""

    @classmethod
    def of(cls, x: Tensor, splits: Splits, format: Format, amaxes: Tensor | None) -> "Messages":
        """Return the messages of x [rows, width]. amaxes: float32 [E], each expert's amax, if the format takes one."""
        grid = None if amaxes is None else [{format.amax_name: amax} for amax in amaxes.view(-1, 1, 1).unbind()]
        with for_slot(SENT, "input", _both(format), x):
            buffers, parts = quantize(x, Target(format, grid=grid), splits=splits).rowwise, []
        for name in _of_rows(format):
            entries = format.layout[name].shape(len(x), x.shape[1])[1] * len(x)
            parts.append(buffers[name][:entries].view(torch.uint8).view(len(x), -1) if len(x) else None)
        sizes = _sizes(format, x.shape[1])
        filled = sum(sizes) + -sum(sizes) % PITCH
        rows = x.new_empty(0, filled, dtype=torch.uint8)
        if len(x):
            rows = F.pad(torch.cat(parts, dim=1), (0, filled - sum(sizes)))
        common = {name: buffers[name] for name in format.layout if name not in _of_rows(format)}
        return cls(format=format, width=x.shape[1], dtype=x.dtype, rows=rows, common=common)

    def operand(self, rows: Tensor, splits: Splits, first: int) -> Operand:
        """Return the rowwise operand of received rows, in the order of experts. first: the first expert of the
        splits."""
        buffers, start = {}, 0
        for name, size in zip(_of_rows(self.format), _sizes(self.format, self.width), strict=True):
            part = rows[:, start : start + size].contiguous()
            buffers[name] = part.view(self.format.layout[name].dtype).view(-1)
            start += size
        buffers |= {name: entries.view(-1)[first : first + splits.count] for name, entries in self.common.items()}
        ordered = {name: buffers[name] for name in self.format.layout}
        layout = GroupLayout.of(splits, self.width, columnwise=False)
        return Operand(format=self.format, layout=layout, dtype=self.dtype, buffers=ordered)


def _of_rows(format: Format) -> list[str]:
    """Return the buffers with separate entries for each row."""
    return [name for name, buffer in format.layout.items() if buffer.rows != WHOLE]


def _sizes(format: Format, width: int) -> list[int]:
    """Return the bytes of a row in each of these buffers."""
    buffers = [format.layout[name] for name in _of_rows(format)]
    return [buffer.shape(1, width)[1] * buffer.dtype.itemsize for buffer in buffers]


def agreed_amaxes(x: Tensor, splits: Splits, format: Format, group: object) -> Tensor | None:
    """Return float32 [E]: the largest amax of each expert's rows over the group, without NaN.

    None for a format without an amax of the matrix.
    """
    if format.amax_name is None or format.row_scaled:
        return None
    amaxes = x.new_zeros(splits.count, dtype=torch.float32)
    find_amax(x, Search(format, amaxes), splits=splits)
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
    return amaxes
