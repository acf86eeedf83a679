"""Expert parallelism: the experts of a model spread over ranks. Each rank has its own tokens, which go to all
experts."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hqsweep.errors import UserError
from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.experts.grouped_linear import GroupedLinear
from hqsweep.nn.experts.moe import LayerNormMoE
from hqsweep.parallel.mesh import axis_of, peers
from hqsweep.parallel.shared.dispatch import Dispatcher
from hqsweep.parallel.shared.expert_room import ExpertRoom, check_room
from hqsweep.parallel.shared.experts import SharedExperts
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
