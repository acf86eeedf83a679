"""The exchanges of units of fully_shard: gathers in a narrower dtype (Gathering), and copies between GPUs.

Within a machine, units exchange by copy engines (p2p_copy), else by collectives. torch calls these on its own streams.
A collective there takes multiprocessors from the GEMMs beside it; a copy takes none. Gradients are added in the order
of ranks and rounded once.

Gathering makes fully_shard gather a plain weight in a narrower dtype, and frees the memory early.

In the first pass torch makes the whole parameter; later it refills the same objects. gather_in makes these objects
first: a GatheredWeight over the memory that torch fills. Kept codes of a weight are freed together with its values.
Private attributes of FSDP are as in torch 2.11 to 2.15.

Each gather is quantized once, and its values are freed then. If forward and backward share a gather, both operands are
made at once, and kept as codes until torch shards the weight again. They take 2.06 bytes an element for mxfp8 and 1.13
for nvfp4, instead of 2. After a forward without recomputation, only the columnwise operand is kept: 1.03 and 0.56
bytes. If backward gathers again, each pass makes its own operand, also of square tiles, since resharding should keep
nothing between the passes.
"""

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hqsweep.ops.library import in_backward
from hqsweep.parallel.shards.fsdp_state import allocate, free, is_free, served
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.collectives import all_gather
from hqsweep.parallel.wire.tokens import sum_parts
from hqsweep.quant.gathered_weight import GatheredWeight
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand
from hqsweep.torch_private import (
    fsdp_cuts_again,
    fsdp_dtensor_spec,
    fsdp_exchanges,
    fsdp_phase,
    fsdp_set_inner_tensors,
    fsdp_set_whole,
    fsdp_shape,
    fsdp_shard_data,
    unsafe_preserve_version_counter,
)


class WeightCall(Protocol):
    """A LinearCall, as a gather asks it."""

    dtype: torch.dtype
    grad: bool
    context: Any

    def quantizer(self, tensor: str) -> HybridQuantizer:
        """The quantizer of a tensor."""

    def key(self, tensor: str) -> Any:
        """The key of the tensor's random bits."""


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

    def operand(
        self,
        call: WeightCall,
        weights: Sequence[GatheredWeight],
        direction: Direction,
        make: Callable[..., HybridOperand],
        *,
        needs_column: bool,
    ) -> Any:
        """The operand of one direction of weights that are GatheredWeights, in a LinearCall.

        make(directions[, output]) quantizes them; needs_column: whether the columnwise one is read, too."""
        quantizer = call.quantizer("weight")
        key = call.key("weight") if quantizer.reads_key else None
        views = tuple((weight.shape, weight.value.stride(), weight.value.storage_offset()) for weight in weights)
        identity = (quantizer, call.dtype, key, views)
        cached = self.kept(direction, identity)
        if cached is not None:
            return cached
        served = self.served(direction)
        if len(served) > 1 and not _are_cacheable(call, quantizer, needs_column):
            return getattr(make([direction]), direction)
        if len(served) > 1:
            wanted = DIRECTIONS if needs_column else [direction]
            operands = make(wanted, "codes")
            for name in wanted:
                if name != direction or self.is_read_again(name):
                    self.keep(name, identity, getattr(operands, name))
        else:
            operands = make([direction])
        if type(quantizer) is HybridQuantizer and not (_are_values(quantizer, served) or call.context.probe):
            for weight in weights:
                weight.gathering.give_up()
        return getattr(operands, direction)


def _are_cacheable(call: WeightCall, quantizer: HybridQuantizer, needs_column: bool) -> bool:
    """Return whether operands may be kept between passes.

    Their scales must follow from the values, and their codes must not be the values themselves. In an evaluation
    nothing is kept: a training forward in the same gather may read the columnwise operand.
    """
    of_values = type(quantizer) is HybridQuantizer and not quantizer.delayed
    is_read = needs_column or call.grad
    return is_read and of_values and not _are_values(quantizer, DIRECTIONS) and not call.context.probe


def _are_values(quantizer: HybridQuantizer, directions: tuple[Direction, ...]) -> bool:
    """Whether an operand may be the values themselves, in the memory that they have."""
    return any(getattr(quantizer, direction).high_precision for direction in directions)


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


DefaultAllGather, DefaultReduceScatter = fsdp_exchanges()
GATHERS = p2p_copy.Purpose("gather", slots=1, most=1 << 28)
SUMS = p2p_copy.Purpose("sum", slots=1, most=1 << 28)
"""One slot is enough: each exchange has arrived before the next begins, and ranks wait for each other as in a
collective."""


class Gather(DefaultAllGather):
    """The all_gather of a unit's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        rank, world = group.rank(), group.size()
        others = [other for other in range(world) if other != rank]
        arriving = p2p_copy.begin(dict.fromkeys(others, (input_tensor,)), group, purpose=GATHERS)
        if arriving is None:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        places = output_tensor.view(world, -1).view(torch.uint8)
        if input_tensor.data_ptr() != places[rank].data_ptr():
            places[rank].copy_(input_tensor.view(-1).view(torch.uint8))
        for other, message in zip(others, arriving(), strict=True):
            places[other].copy_(message)
        return None


class Sum(DefaultReduceScatter):
    """The reduce_scatter of a unit's gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        rank, world = group.rank(), group.size()
        parts, arriving = input_tensor.view(world, -1), None
        if op == dist.ReduceOp.SUM:
            messages = {other: (parts[other],) for other in range(world) if other != rank}
            arriving = p2p_copy.begin(messages, group, purpose=SUMS)
        if arriving is None:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        received = arriving().view(parts.dtype).view(world - 1, 1, -1)
        sum_parts(parts[None], received, rank, out=output_tensor.view(1, -1))
        return None


def exchange_by_copies(unit: Any) -> None:
    """Have a unit of fully_shard exchange by Gather and Sum."""
    unit.set_custom_all_gather(Gather())
    unit.set_custom_reduce_scatter(Sum())
