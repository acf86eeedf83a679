"""Expert parallelism: the experts of a model spread over ranks, each of which has tokens of its own for all of them."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hqsweep.errors import UserError
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.experts.grouped_linear import GroupedLinear
from hqsweep.nn.experts.moe import LayerNormMoE
from hqsweep.parallel.axis_peers import axis_of, peers
from hqsweep.parallel.shared.dispatch import Dispatcher
from hqsweep.parallel.shared.expert_room import ExpertRoom, check_room
from hqsweep.parallel.shared.experts import SharedExperts
from hqsweep.parallel.wire.local import local

__all__ = ["check_room", "expert_parallel"]

AXIS = "ep"
SHARED = "tp"
"""The axis over which tensor_parallel has cut each expert, if it has."""


def expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, average: bool = True, expert_room: float | None = None
) -> nn.Module:
    """Spread the experts of every LayerNormMoE of the model, in place, over the ranks along an axis of the mesh: "ep",
    or the only one. Returns the model.

    With n ranks and E experts, rank r holds the experts r * E / n to (r + 1) * E / n - 1, which before this call it
    must have had as all ranks have them: parameters [E, ...] become DTensors with Shard(0). Tokens go to their experts
    and back by all_to_all, in the order in which one process with the tokens of all ranks, rank by rank, has them.
    Outputs and gradients of inputs are to the byte what experts compute there, scales and random bits included; so are
    gradients of the experts' weights, but divided by n, as gradients are that are averaged over data-parallel ranks;
    not with average=False, for losses that are divided by the number of ranks and gradients that are summed over them.
    Random bits are those of the first rank's microbatch. Ranks along other axes of the mesh hold the same experts, or,
    along "tp" after tensor_parallel, parts of the same, and share their amaxes of delayed scaling. Every rank calls the
    model as often as the others; it may have no tokens for some experts, or none at all.

    expert_room: room at each rank's experts for this many times the rows that come when all experts are chosen equally
    often. The numbers of rows then stay on the device: nothing waits for them, and CUDA graphs can be captured, for the
    memory of rows that do not come. All ranks must have as many tokens as each other. Where rows find no room, results
    are NaN, and check_room() says why; n times as many always find some. None: the host waits once in each layer for
    the numbers of rows, and there is room for these.

    Raises:
        UserError: for a mesh of several axes without "ep", a number of experts that ranks do not divide, a model
            without a LayerNormMoE, experts that are spread already, and an expert_room below 1.
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
    """The part of the experts that is this rank's, of parameters of which tensor_parallel may have cut each expert."""
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
    link_states([local(weight) for weight in grouped.weights], grouped.states)  # which copies do not have
