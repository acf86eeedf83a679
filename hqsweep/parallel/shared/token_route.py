"""Route: the way of a mixture's rows to their experts on other ranks in one call, and back, for autograd.

Rows travel in bfloat16, or as codes with their scales, one message of bytes per row. A rowwise operand can be sent this
way if every code and scale belongs to one row. An amax of the whole matrix is allowed; ranks agree on it first. The
receiver makes the columnwise operand from decoded codes alone. A recipe that makes it from the original values is not
sent as codes, unless no product reads that operand.
"""

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.formats import WHOLE, Format
from hqsweep.memo import memo
from hqsweep.nn.core.context import OUTSIDE, current, within
from hqsweep.nn.router import Routing
from hqsweep.ops.layout import GroupLayout
from hqsweep.ops.quantize.amax import Search, find_amax
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.splits import Splits
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


class Codes(UserDict[str, Operand]):
    """hqsweep.nn.core.wire.Codes. It is not a dict, since hooks of fully_shard may copy a dict, and backward may fill
    this one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Route(ABC):
    """The way of the rows of one call to their experts, and back."""

    group: Any
    """The process group over which the experts are spread."""
    same_experts: Any
    """The process group with the same experts as this rank. It shares amaxes of delayed scaling."""
    first: int
    """The first expert of this rank."""
    local: Splits
    """The splits of the sent rows, over all experts."""
    splits: Splits
    """The padded splits of the received rows, over the experts of this rank."""
    microbatch: int
    """The microbatch of the first rank. The experts draw the random bits of all rows under it."""

    @abstractmethod
    def moved(self, rows: Tensor, fillers: Tensor) -> Tensor:
        """Return rows [M * k, X], sorted by expert, at their experts. fillers [experts of this rank, X]: the padding
        rows."""

    @abstractmethod
    def returned(self, rows: Tensor) -> Tensor:
        """Return rows at their experts to their sources, the inverse of moved()."""

    @property
    @abstractmethod
    def fills_up(self) -> bool:
        """Whether rows may be padded."""

    @property
    def end(self) -> Tensor | None:
        """int64 [1] on the device: the number of received rows; None if every row is in use."""
        return None

    def marked(self, routing: Routing) -> Routing:
        """Return the routing, with NaN results if rows lacked room."""
        return routing

    def go(self, rows: Tensor, format: Format | None, codes: Codes | None) -> Tensor:
        """Return the rows of this rank's experts, from rows [M * k, D], sorted by expert.

        With a format only codes are sent: they become the "input" of `codes`, and the rows have no values. Gradients
        are sent as values.
        """
        return _Go.apply(rows, self, format, codes)

    def come_back(self, rows: Tensor, format: Format | None, codes: Codes | None) -> Tensor:
        """Return the inverse of go(). Gradients are sent as codes of the format, and become the "grad_output" of
        `codes`."""
        return _ComeBack.apply(rows, self, format, codes)

    def context(self) -> AbstractContextManager:
        """Return the context for calls of the experts.

        They draw bits once for the rows of all ranks, and share amaxes of delayed scaling with ranks that hold the same
        experts.
        """
        if current() is OUTSIDE:
            return nullcontext()
        return within(replace(current(), microbatch=self.microbatch, amax_group=self.same_experts))

    def gone(self, rows: Tensor) -> Tensor:
        """Return the rows at their experts, padded with zeros."""
        return self.moved(rows, rows.new_zeros(self.splits.count, rows.shape[1]))

    def gone_as_codes(self, rows: Tensor, format: Format) -> tuple[Tensor, Operand]:
        """Return gone() by messages: a matrix of that shape without values, and its rowwise operand."""
        amaxes = agreed_amaxes(rows, self.local, format, self.group)
        messages = Messages.of(rows, self.local, format, amaxes)
        fillers = messages.rows[:0]
        if self.fills_up:
            own = None if amaxes is None else amaxes[self.first : self.first + self.splits.count]
            zeros, single_rows = rows.new_zeros(self.splits.count, rows.shape[1]), Splits.uniform(self.splits.count, 1)
            fillers = Messages.of(zeros, single_rows, format, own).rows
        operand = messages.operand(self.moved(messages.rows, fillers), self.splits, self.first)
        return rows.new_empty(()).expand(self.splits.rows, rows.shape[1]), operand


def known_splits(sizes: Tensor) -> Splits:
    """Return Splits of sizes that the host knows, treated like sizes that only the device knows.

    So products are the same as in one process.
    """
    sizes = tuple(sizes.tolist())
    return Splits(rows=sum(sizes), count=len(sizes), sizes=sizes, for_plans=False)


class _Go(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, route: Route, format: Format | None, codes: Codes | None) -> Tensor:
        ctx.route = route
        if format is None:
            return route.gone(rows)
        rows, codes["input"] = route.gone_as_codes(rows, format)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.route.returned(dy), None, None, None


class _ComeBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, route: Route, format: Format | None, codes: Codes | None) -> Tensor:
        ctx.route, ctx.format, ctx.codes = route, format, codes
        return route.returned(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.format is None:
            return ctx.route.gone(dy), None, None, None
        rows, ctx.codes["grad_output"] = ctx.route.gone_as_codes(dy, ctx.format)
        return rows, None, None, None
