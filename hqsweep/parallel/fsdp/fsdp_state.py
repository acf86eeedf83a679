"""What torch's fully_shard keeps of a model: its groups, what a gather serves, and FP32 gradients of what it gathers.

A weight that is gathered in bfloat16 takes no other gradient from autograd. FSDP has a sum of its own for microbatches
that are not reduced, in the dtype of the reduction: what is written there is reduced in the place of the grad. Since
torch 2.15 that sum is the grad of the gathered weight, which may have another dtype than the weight.
Attributes of torch's that are not public are read here alone; FSDP of torch 2.11 to 2.15 has them.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hqsweep.ops.library import in_backward

_UNITS: WeakSet[Any] = WeakSet()
"""torch's FSDPParam of each parameter whose gradient is summed in FP32."""
_OF_WEIGHT = "_hqsweep_fsdp_param"
DIRECTIONS = ("rowwise", "columnwise")


def sum_in_fp32(module: nn.Module) -> None:
    """Have unsharded_sum know the parameters of every unit of fully_shard in the module. All gradients of a unit are
    summed in FP32 once it was asked for one of its weights."""
    _UNITS.update(parameters_of(module))


def parameters_of(module: nn.Module) -> list[Any]:
    """torch's FSDPParam of each parameter of every unit of fully_shard in the module."""
    return [parameter for part in module.modules() for group in groups_of(part) for parameter in group.fsdp_params]


def gathered_storages(parameters: Iterable[Any]) -> frozenset[int]:
    """The storages into which torch gathers FSDPParams, by the addresses of these objects, which stay when torch frees
    the memory and fills it anew. A parameter has none before its first gather."""
    tensors = (
        t for parameter in parameters for t in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors)
    )
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def groups_of(module: nn.Module) -> list[Any]:
    """torch's FSDPParamGroup of each group of parameters of a unit that fully_shard was called on; [] for others."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return []
    state = state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch had several for a unit
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def hook_ids(module: nn.Module) -> set[int]:
    """The ids of the hooks that fully_shard has put around the forward of a module."""
    state = getattr(module, "_get_fsdp_state", None)
    if state is None:
        return set()
    state = state()
    return {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}


def served(group: Any, *, repeats: bool, recomputes: bool) -> tuple[str, ...]:
    """The directions of weights that are read before torch gathers a group again; both where a forward or a backward
    may follow without a gather. repeats: a forward reads more than once, recomputes: backward runs forward again."""
    state, reshards = group._training_state.name, bool(group._reshard_after_forward)
    if state == "FORWARD" and reshards and not in_backward() and not repeats:
        return DIRECTIONS[:1]
    if state == "PRE_BACKWARD" and reshards and group.reshard_after_backward and not recomputes:
        return DIRECTIONS[1:]
    return DIRECTIONS


def drop_pass(module: nn.Module) -> None:
    """Have every unit of fully_shard in the module begin anew, where an error has ended a forward or a backward: its
    shards are the parameters, nothing is on its way, and there are no gradients."""
    for part in module.modules():
        for group in groups_of(part):
            state, engine = part._get_fsdp_state(), group.comm_ctx
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            engine.all_gather_state = None
            if hasattr(engine, "reduce_scatter_states"):  # since torch 2.13
                engine.reduce_scatter_states.clear()
                engine._last_post_reduce_events.clear()
            else:
                engine.reduce_scatter_state = None
            engine.post_forward_order.clear()
            group._post_forward_indices.clear()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            state._training_state = group._training_state = type(group._training_state).IDLE
            group._to_sharded()
            for unit in group.fsdp_params:
                if not _sums_in_grad(unit):
                    unit.unsharded_accumulated_grad = None
                if hasattr(unit, "_unsharded_param"):
                    unit._unsharded_param.grad = None


def unsharded_sum(weight: Tensor) -> Tensor | None:
    """float32, of the shape of a weight that fully_shard has gathered: the sum of its gradients that FSDP reduces next.
    A backward adds to it in place of giving autograd a gradient. None for a weight that sum_in_fp32 does not know."""
    unit = _unit_of(weight)
    if unit is None:
        return None
    if _sums_in_grad(unit):
        if weight.grad is None:
            weight.grad_dtype = torch.float32
            weight.grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        return weight.grad
    if unit.unsharded_accumulated_grad is None:
        unit.unsharded_accumulated_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    return unit.unsharded_accumulated_grad


def _sums_in_grad(unit: Any) -> bool:
    """Whether FSDP sums over microbatches in the grad of what it gathers, as it does since torch 2.15."""
    return isinstance(getattr(type(unit), "unsharded_accumulated_grad", None), property)


def _unit_of(weight: Tensor) -> Any:
    if not _UNITS:
        return None
    unit = getattr(weight, _OF_WEIGHT, None)
    if unit is not None:
        return unit
    units = [candidate for candidate in _UNITS if hasattr(candidate, "_unsharded_param") and not candidate.is_dtensor]
    known = {id(candidate._unsharded_param): candidate for candidate in units}
    if id(weight) not in known:
        return None
    for candidate in known.values():
        if not hasattr(candidate._unsharded_param, _OF_WEIGHT):
            setattr(candidate._unsharded_param, _OF_WEIGHT, candidate)
            candidate._unsharded_param.register_post_accumulate_grad_hook(_to_fp32)
    return known[id(weight)]


def _to_fp32(weight: Tensor) -> None:
    """Add the gradient that autograd gave a gathered parameter to its sum: one reduction takes gradients of one
    dtype."""
    if weight.grad is not None and not _sums_in_grad(_unit_of(weight)):  # a module that adds to it gives autograd none
        unsharded_sum(weight).add_(weight.grad)
        weight.grad = None
