"""Rows of tokens on their way to the ranks that hold their experts, and back: all_to_all with uneven splits.

Rows stand at an expert as they would in one process with the tokens of all ranks, one rank's after the other's, so that
every sum over them has the order that it has there. Ranks first exchange how many rows they have for each expert.
Without room for any numbers of them (expert_room) the host waits for these once a layer, as torch's all_to_all takes
numbers of rows from the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.formats import Format
from hqsweep.nn.core.context import current
from hqsweep.nn.experts.grouped_linear import GroupedLinear
from hqsweep.nn.experts.moe import LayerNormMoE
from hqsweep.nn.experts.router import Routing
from hqsweep.nn.linear.activation import activate
from hqsweep.parallel.shared.expert_room import ExpertRoom
from hqsweep.parallel.shared.token_codes import sends_codes
from hqsweep.parallel.shared.token_route import Codes, Route, known_splits


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatcher:
    """The ranks of a group, each of which holds as many of the experts as the others, in the order of ranks."""

    group: Any
    """The process group over whose ranks the experts are spread."""
    same_experts: Any
    """The process group of the ranks that hold the experts of this one: they share amaxes of delayed scaling."""
    room: ExpertRoom | None = None
    """The room for rows at each rank's experts; None: for as many as come, for which the host waits."""

    def send_counts(self, tokens: Tensor, rows: int, multiple: int = 1) -> Route:
        """The route of so many rows, which are sorted by expert; tokens: int64 [E], the rows of each. A collective.
        multiple: experts are filled up with rows of zeros to a multiple of it."""
        groups = {"group": self.group, "same_experts": self.same_experts}
        if self.room is not None:
            return self.room.route(tokens, rows, multiple, groups)
        return _waited_route(tokens, multiple, groups)

    def mixed(self, mixture: LayerNormMoE, routing: Routing, h: Tensor) -> Tensor:
        fc1, fc2, multiples = mixture.fc1, mixture.fc2, {mixture.fc1.filling_multiple, mixture.fc2.filling_multiple}
        formats, fills = (_sent_format(fc1, "input"), _sent_format(fc2, "grad_output")), 1
        if len(multiples) == 1:
            (fills,) = multiples
        else:  # each fills up its rows by itself, which takes values
            formats = None, None
        route = self.send_counts(routing.tokens, routing.chosen.numel(), fills)
        routing, codes = route.marked(routing), [None if f is None else Codes() for f in formats]
        rows = route.go(routing.dispatch(h, fc1.dtype), formats[0], codes[0])
        with route.context():
            hidden = activate(fc1(rows, route.splits, codes[0]), "swiglu", route.end)
            rows = route.come_back(fc2(hidden, route.splits, codes[1]), formats[1], codes[1])
        return routing.combine(rows, None if mixture.shared is None else mixture.shared(h))


def _sent_format(grouped: GroupedLinear, tensor: str) -> Format | None:
    """The format in which the rows of "input" or "grad_output" can come from other ranks as codes, in a call now: that
    of their rowwise operand, where nothing else is made of their values. There are no biases."""
    quantizer = getattr(grouped.active_quantizers(), tensor)
    columnwise = torch.is_grad_enabled() and grouped.weight.requires_grad
    return quantizer.rowwise if sends_codes(quantizer, columnwise) and not current().probe else None


def _waited_route(tokens: Tensor, multiple: int, groups: dict[str, Any]) -> Route:
    """The route of rows whose numbers the host waits for."""
    group = groups["group"]
    ranks, rank, microbatch = dist.get_world_size(group), dist.get_rank(group), current().microbatch
    mine = tokens.view(ranks, -1)
    told = torch.cat([mine, mine.new_full((ranks, 1), microbatch)], dim=1)
    theirs = torch.empty_like(told)
    dist.all_to_all_single(theirs, told, group=group)
    host = torch.stack([told, theirs]).cpu()  # one wait for both
    sent, taken = host[:, :, :-1].sum(dim=2).tolist()
    whole = host[1, :, :-1].sum(dim=0)
    arrived, filled = known_splits(whole), known_splits(-(-whole // multiple) * multiple)
    counts, device = theirs[:, :-1], tokens.device
    experts = torch.arange(arrived.count, device=device).repeat(ranks)
    order = experts.repeat_interleave(counts.flatten(), output_size=arrived.rows).argsort(stable=True)
    places = torch.arange(arrived.rows, device=device)
    if filled.rows > arrived.rows:
        places = places + arrived.spread((filled.offsets(device) - arrived.offsets(device))[:-1])
        zeros = filled.spread(torch.arange(arrived.rows, arrived.rows + arrived.count, device=device))
        order = zeros.index_copy(0, places, order)
    return _WaitedRoute(
        **groups,
        first=rank * arrived.count,
        sent=sent,
        taken=taken,
        local=known_splits(host[0, :, :-1].flatten()),
        order=order,
        inverse=places[order.new_empty(arrived.rows).copy_(order[places]).argsort()],
        splits=filled,
        microbatch=int(host[1, 0, -1]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _WaitedRoute(Route):
    """A route of numbers that the host knows."""

    sent: list[int]
    """How many rows go to each rank."""
    taken: list[int]
    """How many rows come from each rank."""
    order: Tensor
    """int64: the order of the experts, and within each that of ranks, as indices into the R rows that came, which lie
    by rank. R + e stands for a row of zeros that fills up this rank's expert e."""
    inverse: Tensor
    """int64 [R]: the place in `order` of each row that came."""

    @property
    def fills_up(self) -> bool:
        return len(self.order) > sum(self.taken)

    def moved(self, rows: Tensor, fillers: Tensor) -> Tensor:
        came = self._exchanged(rows, self.sent, self.taken)
        return (torch.cat([came, fillers]) if self.fills_up else came).index_select(0, self.order)

    def returned(self, rows: Tensor) -> Tensor:
        return self._exchanged(rows.index_select(0, self.inverse), self.taken, self.sent)

    def _exchanged(self, rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
        received = rows.new_empty(sum(taken), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), taken, sent, group=self.group)
        return received
