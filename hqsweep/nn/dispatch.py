"""Rows of tokens on their way to the ranks that hold their experts, and back: all_to_all with uneven splits.

Rows stand at an expert as they would in one process with the tokens of all ranks, one rank's after the other's, so that
every sum over them has the order that it has there. How many rows a rank has for each expert is told first; the host
waits for it once a layer, as torch's all_to_all takes numbers of rows from the host.
"""

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.formats import Format
from hqsweep.nn.context import OUTSIDE, current, within
from hqsweep.nn.token_codes import Messages, agreed_amaxes
from hqsweep.ops.splits import Splits
from hqsweep.quant.operand import Operand


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatcher:
    """The ranks of a group, each of which holds as many of the experts as the others, in the order of ranks."""

    group: Any
    """The process group over whose ranks the experts are spread."""
    same_experts: Any
    """The process group of the ranks that hold the experts of this one: they share amaxes of delayed scaling."""

    def send_counts(self, tokens: Tensor, multiple: int = 1) -> "Route":
        """The route of rows that are sorted by expert; tokens: int64 [E], the rows of each. Waits for all ranks.
        multiple: experts are filled up with rows of zeros to a multiple of it."""
        ranks, rank, microbatch = dist.get_world_size(self.group), dist.get_rank(self.group), current().microbatch
        mine = tokens.view(ranks, -1)
        told = torch.cat([mine, mine.new_full((ranks, 1), microbatch)], dim=1)
        theirs = torch.empty_like(told)
        dist.all_to_all_single(theirs, told, group=self.group)
        host = torch.stack([told, theirs]).cpu()  # one wait for both
        sent, taken = host[:, :, :-1].sum(dim=2).tolist()
        whole = host[1, :, :-1].sum(dim=0)
        arrived, filled = _splits(whole), _splits(-(-whole // multiple) * multiple)
        counts, device = theirs[:, :-1], tokens.device
        experts = torch.arange(arrived.count, device=device).repeat(ranks)
        order = experts.repeat_interleave(counts.flatten(), output_size=arrived.rows).argsort(stable=True)
        places = torch.arange(arrived.rows, device=device)
        if filled.rows > arrived.rows:
            places = places + arrived.spread((filled.offsets(device) - arrived.offsets(device))[:-1])
            zeros = filled.spread(torch.arange(arrived.rows, arrived.rows + arrived.count, device=device))
            order = zeros.index_copy(0, places, order)
        return Route(
            dispatcher=self,
            first=rank * arrived.count,
            sent=sent,
            taken=taken,
            local=_splits(host[0, :, :-1].flatten()),
            order=order,
            inverse=places[order.new_empty(arrived.rows).copy_(order[places]).argsort()],
            splits=filled,
            microbatch=int(host[1, 0, -1]),
        )


def _splits(sizes: Tensor) -> Splits:
    """The host knows the sizes, but products are those of one process, in which only the device does."""
    sizes = tuple(sizes.tolist())
    return Splits(rows=sum(sizes), count=len(sizes), sizes=sizes, for_plans=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """Where the rows of one call go."""

    dispatcher: Dispatcher
    first: int
    """The first expert of this rank."""
    sent: list[int]
    """How many rows go to each rank."""
    taken: list[int]
    """How many rows come from each rank."""
    local: Splits
    """The splits of the rows that go, over all experts."""
    order: Tensor
    """int64: the order of the experts, and within each that of ranks, as indices into the R rows that came, which lie
    by rank. R + e stands for a row of zeros that fills up this rank's expert e."""
    inverse: Tensor
    """int64 [R]: the place in `order` of each row that came."""
    splits: Splits
    """The splits of the rows that came, filled up, over the experts of this rank."""
    microbatch: int
    """The microbatch of the first rank, under which the experts draw the random bits of all."""

    def go(self, rows: Tensor, format: Format | None, codes: MutableMapping[str, Operand] | None) -> Tensor:
        """Rows [sum of sent, D], sorted by expert -> the rows of this rank's experts. With a format only its codes go:
        they become the "input" of `codes`, and the rows have no values. Gradients go as they are."""
        return _Go.apply(rows, self, format, codes)

    def come_back(self, rows: Tensor, format: Format | None, codes: MutableMapping[str, Operand] | None) -> Tensor:
        """The inverse of go(), whose gradients go as codes of the format: they become the "grad_output"."""
        return _ComeBack.apply(rows, self, format, codes)

    def context(self) -> AbstractContextManager:
        """The context in which experts are called: they draw bits once for the rows of all ranks, and share amaxes of
        delayed scaling with the ranks that hold the same experts."""
        if current() is OUTSIDE:
            return nullcontext()
        return within(replace(current(), microbatch=self.microbatch, amax_group=self.dispatcher.same_experts))

    def gone(self, rows: Tensor) -> Tensor:
        """The rows at their experts."""
        came = self._exchanged(rows, self.sent, self.taken)
        if len(self.order) > len(came):
            came = torch.cat([came, came.new_zeros(self.splits.count, came.shape[1])])
        return came.index_select(0, self.order)

    def gone_as_codes(self, rows: Tensor, format: Format) -> tuple[Tensor, Operand]:
        """gone() by messages: a matrix of that shape without values, and its rowwise operand."""
        amaxes = agreed_amaxes(rows, self.local, format, self.dispatcher.group)
        messages = Messages.of(rows, self.local, format, amaxes)
        came = self._exchanged(messages.rows, self.sent, self.taken)
        if len(self.order) > len(came):
            own = None if amaxes is None else amaxes[self.first : self.first + self.splits.count]
            zeros, single_rows = rows.new_zeros(self.splits.count, rows.shape[1]), Splits.uniform(self.splits.count, 1)
            came = torch.cat([came, Messages.of(zeros, single_rows, format, own).rows])
        operand = messages.operand(came.index_select(0, self.order), self.splits, self.first)
        return rows.new_empty(()).expand(self.splits.rows, rows.shape[1]), operand

    def returned(self, rows: Tensor) -> Tensor:
        """The inverse of gone()."""
        return self._exchanged(rows.index_select(0, self.inverse), self.taken, self.sent)

    def _exchanged(self, rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        received = rows.new_empty(sum(taken), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), taken, sent, group=self.dispatcher.group)
        return received


class _Go(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, rows: Tensor, route: Route, format: Format | None, codes: MutableMapping[str, Operand] | None
    ) -> Tensor:
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
    def forward(
        ctx, rows: Tensor, route: Route, format: Format | None, codes: MutableMapping[str, Operand] | None
    ) -> Tensor:
        ctx.route, ctx.format, ctx.codes = route, format, codes
        return route.returned(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.format is None:
            return ctx.route.gone(dy), None, None, None
        rows, ctx.codes["grad_output"] = ctx.route.gone_as_codes(dy, ctx.format)
        return rows, None, None, None
