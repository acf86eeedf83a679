"""The state that torch's fully_shard keeps of a model: its groups, its gathers, and FP32 sums of gradients.

Autograd takes only bfloat16 gradients for a weight that is gathered in bfloat16. So backward adds float32 gradients to
FSDP's own sum over microbatches, which FSDP reduces in place of the grad. Since torch 2.15 that sum is the grad of the
gathered weight, which may have another dtype than the weight.
"""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hqsweep.ops.library import in_backward
from hqsweep.torch_private import (
    fsdp_drop_pass,
    fsdp_groups,
    fsdp_hook_ids,
    fsdp_parameters,
    fsdp_phase,
    fsdp_reshards,
    fsdp_state,
    fsdp_whole,
)

_UNITS: WeakSet[Any] = WeakSet()
"""Parameter -> torch's FSDPParam, for parameters whose gradient is summed in FP32."""
_OF_WEIGHT = "_hqsweep_fsdp_param"
DIRECTIONS = ("rowwise", "columnwise")


def sum_in_fp32(module: nn.Module) -> None:
    """Register the parameters of every unit of fully_shard in the module for unsharded_sum.

    All gradients of a unit are summed in FP32 from the first call for one of its weights on.
    """
    _UNITS.update(fsdp_parameters(module))


def groups_of(module: nn.Module) -> list[Any]:
    """The FSDPParamGroups of a unit of fully_shard; [] for other modules."""
    return fsdp_groups(fsdp_state(module))


def hook_ids(module: nn.Module) -> set[int]:
    """The ids of the hooks that fully_shard has put around a module's forward."""
    state = fsdp_state(module)
    return set() if state is None else fsdp_hook_ids(state)


def served(group: Any, *, repeats: bool, recomputes: bool) -> tuple[str, ...]:
    """The directions of a weight that are read before torch gathers its group again.

    Both, where a forward or a backward may follow without a gather. repeats: a forward reads more than once.
    recomputes: backward runs forward again.
    """
    state, reshards = fsdp_phase(group), fsdp_reshards(group)
    if state == "FORWARD" and reshards and not in_backward() and not repeats:
        return DIRECTIONS[:1]
    if state == "PRE_BACKWARD" and reshards and group.reshard_after_backward and not recomputes:
        return DIRECTIONS[1:]
    return DIRECTIONS


def drop_pass(module: nn.Module) -> None:
    """Reset every unit of fully_shard in the module, after an error in a forward or a backward.

    Afterwards the shards are the parameters again. No exchange is on its way, and no gradients exist.
    """
    for part in module.modules():
        for group in groups_of(part):
            fsdp_drop_pass(fsdp_state(part), group)
            for unit in group.fsdp_params:
                if not _sums_in_grad(unit):
                    unit.unsharded_accumulated_grad = None
                if (whole := fsdp_whole(unit)) is not None:
                    whole.grad = None


def unsharded_sum(weight: Tensor) -> Tensor | None:
    """Return the float32 sum of a gathered weight's gradients that FSDP reduces next, in the weight's shape.

    None for a weight that sum_in_fp32 does not know. A backward adds to it, and gives autograd no gradient.
    """
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
    """Whether FSDP sums over microbatches in the grad of the gathered parameter, as it does since torch 2.15."""
    return isinstance(getattr(type(unit), "unsharded_accumulated_grad", None), property)


def _unit_of(weight: Tensor) -> Any:
    if not _UNITS:
        return None
    unit = getattr(weight, _OF_WEIGHT, None)
    if unit is not None:
        return unit
    found = [(candidate, fsdp_whole(candidate)) for candidate in _UNITS if not candidate.is_dtensor]
    known = {id(whole): (candidate, whole) for candidate, whole in found if whole is not None}
    if id(weight) not in known:
        return None
    for candidate, whole in known.values():
        if not hasattr(whole, _OF_WEIGHT):
            setattr(whole, _OF_WEIGHT, candidate)
            whole.register_post_accumulate_grad_hook(_to_fp32)
    return known[id(weight)][0]


def _to_fp32(weight: Tensor) -> None:
    """Add autograd's gradient of a gathered parameter to its FP32 sum, because a reduction takes gradients of one
    dtype."""
    if weight.grad is not None and not _sums_in_grad(
        _unit_of(weight)
    ):  # a backward that adds to the sum gives autograd no gradient
        unsharded_sum(weight).add_(weight.grad)
        weight.grad = None


def is_free(tensor: Tensor) -> bool:
    """Whether the memory of a tensor with elements is freed."""
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def allocate(tensor: Tensor) -> None:
    """Allocate the freed memory of a tensor again; its values are undefined."""
    if is_free(tensor):
        tensor.untyped_storage().resize_(tensor.nbytes)


def free(tensor: Tensor) -> None:
    """Free the memory of a tensor, and of all tensors that share it."""
    tensor.untyped_storage().resize_(0)
