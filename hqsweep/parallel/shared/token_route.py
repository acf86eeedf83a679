"""Route: the way of a mixture's rows to their experts on other ranks in one call, and back, for autograd."""

from abc import ABC, abstractmethod
from collections import UserDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.formats import Format
from hqsweep.nn.core.context import OUTSIDE, current, within
from hqsweep.nn.experts.router import Routing
from hqsweep.ops.members.splits import Splits
from hqsweep.parallel.shared.token_codes import Messages, agreed_amaxes
from hqsweep.quant.operand import Operand


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
