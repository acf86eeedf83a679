"""Expert parallelism: the experts of a model spread over ranks. Each rank has its own tokens, which go to all
experts: all_to_all with uneven splits takes their rows to the ranks that hold the experts, and back.

At an expert, rows are in the order of one process with the tokens of all ranks: by rank, then by token. So every sum
over them has the same order. Ranks first exchange how many rows they have for each expert. torch's all_to_all takes
these numbers from the host, so that the host waits once a layer. With expert_room it does not wait.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.nn.core.context import current
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.layernorm_linears import activate
from hqsweep.nn.router import Routing
from hqsweep.nn.transformer import LayerNormMoE
from hqsweep.parallel.mesh import axis_of, peers
from hqsweep.parallel.shared.expert_room import ExpertRoom, check_room
from hqsweep.parallel.shared.experts import SharedExperts
from hqsweep.parallel.shared.token_route import Codes, Route, known_splits, sends_codes
from hqsweep.parallel.wire.local import local

__all__ = ["check_room", "expert_parallel"]

AXIS = "ep"
SHARED = "tp"
"""The axis over which tensor_parallel may have cut each expert."""


def expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, average: bool = True, expert_room: float | None = None
) -> nn.Module:
    """Spread the experts of every LayerNormMoE of a model, in place, over the ranks along an axis of the mesh: "ep", or
    the only one. Returns the model.

    With n ranks and E experts, rank r keeps the experts r * E / n to (r + 1) * E / n - 1. All ranks have all experts
    with equal values before this call. Parameters [E, ...] become DTensors with Shard(0). Ranks along other axes of the
    mesh hold the same experts, or parts of the same along "tp", and share their amaxes of delayed scaling.

    Tokens go to their experts and back by all_to_all, in the order that they have in one process, rank by rank. Outputs
    and gradients have the bytes of that process, scales and random bits included. Random bits are drawn for the first
    rank's microbatch. Gradients of experts' weights are divided by n, like gradients that are averaged over
    data-parallel ranks. average=False leaves them undivided, for losses that are divided by the number of ranks and
    gradients that are summed. Every rank calls the model equally often; it may have no tokens for some experts, or none
    at all.

    expert_room: room at each rank's experts, in units of the rows that come when all experts are chosen equally often.
    The numbers of rows then stay on the device, so that nothing waits and CUDA graphs can be captured; unused room
    costs memory. All ranks must have equally many tokens. Where rows find no room, results are NaN, and check_room()
    says why; n always has room. None: the host waits in each layer for the numbers of rows, and makes room for these.

    Raises:
        UserError: for a mesh of several axes without "ep", a number of experts that ranks do not divide, a model
            without a LayerNormMoE, experts that lie over ranks already, and an expert_room below 1.
    """
    along = axis_of(mesh, AXIS, "expert_parallel")
    mixtures = [module for module in model.modules() if isinstance(module, LayerNormMoE)]
    if not mixtures:
        raise UserError(f"expert_parallel: {type(model).__name__} has no LayerNormMoE, and so no experts to spread")
    ranks = along.size()
    for mixture in mixtures:
        if mixture.dispatcher is not None:
            raise UserError(f"{mixture.name}: its experts are spread over ranks already")
        if mixture.fc1.num_experts % ranks:
            raise UserError(
                f"{mixture.name}: {mixture.fc1.num_experts} experts over {ranks} ranks; ep takes a number that divides"
                " the experts"
            )
        if mixture.fc1.parallel is not None and not {AXIS, SHARED} <= {*(mesh.mesh_dim_names or ())}:
            raise UserError(
                f"{mixture.name}: its experts are cut over '{SHARED}'; expert_parallel takes a mesh with that axis"
                f" beside '{AXIS}'"
            )
    room = None if expert_room is None else ExpertRoom(expert_room)
    dispatcher = Dispatcher(group=along.get_group(), same_experts=peers(mesh, AXIS), room=room)
    for mixture in mixtures:
        mixture.dispatcher = dispatcher
        for grouped in (mixture.fc1, mixture.fc2):
            _hold_own(grouped, mesh, along, along.size() if average else 1)
    return model


def _hold_own(grouped: GroupedLinear, mesh: DeviceMesh, along: DeviceMesh, mean_over: int) -> None:
    """Keep this rank's part of the experts. tensor_parallel may have cut each expert before."""
    count, wholes = grouped.num_experts // along.size(), dict(grouped.named_parameters(recurse=False))
    for name, whole in wholes.items():
        part = nn.Parameter(local(whole.detach()), requires_grad=whole.requires_grad)
        grouped.register_parameter(name, part)
    grouped.hold_experts(along.get_local_rank() * count, count)
    features = None if grouped.parallel is None else grouped.parallel.features
    grouped.parallel = SharedExperts(features=features, mean_over=mean_over)
    for name, parameter in list(grouped.named_parameters(recurse=False)):
        over, cuts, of_whole = along, [Shard(0)], {}
        if isinstance(wholes[name], DTensor):
            over, cuts = mesh[AXIS, SHARED], [*cuts, *wholes[name].placements]
            of_whole = {"shape": wholes[name].shape, "stride": wholes[name].stride()}
        whole = DTensor.from_local(parameter.detach(), over, cuts, run_check=False, **of_whole)
        grouped.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    # The new parameters are copies, which have lost these links.
    link_states([local(weight) for weight in grouped.weights], grouped.states)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatcher:
    """The ranks of a group, which share the experts equally, in the order of ranks."""

    group: Any
    """The process group over which the experts are spread."""
    same_experts: Any
    """The process group with the same experts as this rank. It shares amaxes of delayed scaling."""
    room: ExpertRoom | None = None
    """The room for rows at each rank's experts; None: any number of rows, for which the host waits."""

    def send_counts(self, tokens: Tensor, rows: int, multiple: int = 1) -> Route:
        """Return the route of `rows` rows, sorted by expert. tokens: int64 [E], the rows of each expert. A collective.

        multiple: experts are padded with zero rows to a multiple of it.
        """
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
    """Return the format in which rows of "input" or "grad_output" can come from other ranks as codes; None: as values.

    It is the format of their rowwise operand, if no other operand needs their values. Without biases.
    """
    quantizer = getattr(grouped.active_quantizers(), tensor)
    columnwise = torch.is_grad_enabled() and grouped.weight.requires_grad
    return quantizer.rowwise if sends_codes(quantizer, columnwise) and not current().probe else None


def _waited_route(tokens: Tensor, multiple: int, groups: dict[str, Any]) -> Route:
    """Return the route of rows whose numbers the host waits for."""
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
    """A route whose numbers of rows the host knows."""

    sent: list[int]
    """The number of rows for each rank."""
    taken: list[int]
    """The number of rows from each rank."""
    order: Tensor
    """int64: row indices into the R received rows, which are sorted by rank; the result is sorted by expert, then by
    rank.

    Index R + e is a zero row that pads this rank's expert e.
    """
    inverse: Tensor
    """int64 [R]: the place of each received row in `order`."""

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
