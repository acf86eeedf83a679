"""Gathering: makes fully_shard gather a plain weight in a narrower dtype, and frees the memory early.

In the first pass torch makes the whole parameter, and refills the same objects later. gather_in makes these objects
before: a GatheredWeight over the memory that torch fills. Codes that are kept of a weight are freed together with its
values. Private attributes of FSDP are those of torch 2.11 to 2.15.
"""

import math
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hqsweep.parallel.fsdp.fsdp_state import allocate, free, in_backward, is_free, served
from hqsweep.parallel.fsdp.gathered_weight import GatheredWeight
from hqsweep.parallel.wire.collectives import all_gather
from hqsweep.torch_private import (
    fsdp_cuts_again,
    fsdp_dtensor_spec,
    fsdp_phase,
    fsdp_set_inner_tensors,
    fsdp_set_whole,
    fsdp_shape,
    fsdp_shard_data,
    unsafe_preserve_version_counter,
)


class Gathering:
    """The gathers of one weight: `parameter`, an FSDPParam of `group`, gathers it into `flat`."""

    def __init__(self, group: Any, parameter: Any, flat: Tensor) -> None:
        self._group, self._parameter, self._flat = weakref.ref(group), weakref.ref(parameter), flat
        self._operands: dict[str, tuple[Hashable, Any, Sequence[Tensor]]] = {}
        self._repeats = self._recomputes = False
        """For forward and backward: whether it has read the weight again after reading or freeing it."""
        alone = type(parameter.mesh_info).__name__ == "DDPMeshInfo" or parameter.shard_mesh.size() == 1
        self._refillable = not alone and parameter.fsdp_placement.dim == 0

    def fill(self) -> None:
        """Gather the values if they were freed. A collective: all ranks read the same weights in the same order."""
        if not is_free(self._flat):
            return
        if in_backward():
            self._recomputes = True
        else:
            self._repeats = True
        parameter = self._parameter()
        own = fsdp_shard_data(parameter).to(self._flat.device).to(self._flat.dtype)
        allocate(self._flat)
        with torch.no_grad(), unsafe_preserve_version_counter(self._flat):
            all_gather(self._flat, own, group=parameter.shard_mesh.get_group())

    def give_up(self) -> None:
        """Free the values. All operands that this gather serves are made."""
        group = self._group()
        cut_again = fsdp_cuts_again(group) and fsdp_phase(group) == "FORWARD"
        if self._refillable and not cut_again:
            free(self._flat)

    def served(self, direction: str) -> tuple[str, ...]:
        """The directions that are read from this gather, when one of them is read."""
        if direction == "rowwise" and in_backward():
            self._recomputes = True
        return served(self._group(), repeats=self._repeats, recomputes=self._recomputes)

    def is_read_again(self, direction: str) -> bool:
        """Whether a direction may be read once more from a gather that serves both."""
        group = self._group()
        once = fsdp_phase(group) == "FORWARD" and group.reshard_after_backward and not in_backward()
        return direction == "columnwise" or self._repeats or self._recomputes or not once

    def keep(self, direction: str, identity: Hashable, operand: Any) -> None:
        """Keep an operand until the weight is sharded again."""
        tensors = list(operand.buffers.values())
        entries = self._operands.items()
        others = {d: entry for d, entry in entries if d != direction and not any(map(is_free, entry[2]))}
        self._operands = others | {direction: (identity, operand, tensors)}
        fsdp_set_inner_tensors(self._parameter(), [t for *_, own in self._operands.values() for t in own])

    def kept(self, direction: str, identity: Hashable) -> Any:
        """The kept operand of that identity; None without one."""
        known, operand, tensors = self._operands.get(direction, (None, None, ()))
        return operand if known == identity and not any(map(is_free, tensors)) else None


def gather_in(group: Any, parameter: Any, dtype: torch.dtype) -> None:
    """Have an FSDPParam of a group gather in a dtype narrower than its own, into a GatheredWeight.

    Where the group's policy has a dtype for parameters, the messages and the weight both have that dtype.
    """
    policy = (getattr(group, "mp_policy", None) or parameter.mp_policy).param_dtype  # on the parameter since torch 2.15
    own = parameter.sharded_param.dtype
    device, shape = parameter.device, fsdp_shape(parameter)
    alone = type(parameter.mesh_info).__name__ == "DDPMeshInfo"
    ranks = 1 if alone else parameter.shard_mesh.size()
    size = parameter.padded_sharded_param_size.numel() * ranks
    flat = torch.empty(size, dtype=policy or dtype, device=device)
    value = flat[: math.prod(shape)].view(shape)
    free(flat)
    weight: Tensor = GatheredWeight(value, policy or own, Gathering(group, parameter, flat))
    sharded = fsdp_dtensor_spec(parameter)
    if sharded is not None:
        options = {"run_check": False, "shape": sharded.shape, "stride": sharded.stride}
        weight = DTensor.from_local(weight, sharded.mesh, sharded.placements, **options)
    parameter.all_gather_outputs = [flat]
    fsdp_set_whole(parameter, nn.Parameter(weight, requires_grad=parameter.sharded_param.requires_grad))
    if policy is None:
        _set_dtype(parameter, dtype)


def _set_dtype(parameter: Any, dtype: torch.dtype) -> None:
    """Have torch gather the parameter in this dtype from its first forward on."""
    init = parameter.init_dtype_attrs

    def init_dtype_attrs(policy: Any) -> None:
        init(policy)
        parameter.param_dtype = dtype if dtype != parameter.orig_dtype else None

    parameter.init_dtype_attrs = init_dtype_attrs
