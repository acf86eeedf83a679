"""The mesh of ranks: one DeviceMesh, whose axes are named as torchtitan names them."""

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hqsweep.config.train import ParallelConfig, sharing_gpus
from hqsweep.errors import UserError
from hqsweep.parallel.wire.devices import ranks_of_gpu, stand_apart, take_gpu
from hqsweep.parallel.wire.process_group import begin_process_group

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes of the mesh, from the outermost to the innermost: neighbours, which exchange the most, are on one node."""
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "tp")
TIMEOUT_S = 1800.0
"""The seconds that a rank waits for the others, for instance for one that writes a state. It does not wait for a rank
that has ended."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks of one training and this process among them."""

    dims: ParallelConfig
    mesh: DeviceMesh
    """The mesh with the axes AXES."""
    device: torch.device
    per_gpu: int = 1
    """The ranks that share this rank's GPU."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0 to size - 1."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        return self.dims.world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes rows, states and warnings."""
        return self.rank == 0

    @cached_property
    def data_rank(self) -> int:
        """The number of the part of a step's batch that this rank has, from 0 to data_size - 1; equal for all ranks of
        tp and pp."""
        return self._data_mesh.get_local_rank()

    @property
    def data_size(self) -> int:
        """The number of parts of a step's batch."""
        return self.dims.data

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that fully_shard takes: [dp_shard], with copies [dp_replicate, dp_shard]."""
        if self.dims.dp_replicate == 1:
            return self.mesh["dp_shard"]
        return self.mesh["dp_replicate", "dp_shard"]

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks with the same part of the model's computation and other sequences, in order of data_rank."""
        return self._data_mesh.get_group()

    @cached_property
    def _data_mesh(self) -> DeviceMesh:
        return self.mesh["dp_replicate", "dp_shard"]._flatten("dp")

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks with the axes pp, dp_replicate, efsdp, ep and tp. dp_shard is divided into ep neighbours,
        which share out the experts, and efsdp ranks, which share out the parameters of the same experts."""
        dims = self.dims
        sizes = (dims.pp, dims.dp_replicate, dims.dp_shard // dims.ep, dims.ep, dims.tp)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=EXPERT_AXES)

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The mesh that fully_shard takes for experts: the ranks that hold the same ones, with the axes of
        fsdp_mesh."""
        if self.dims.dp_replicate == 1:
            return self.expert_mesh["efsdp"]
        return self.expert_mesh["dp_replicate", "efsdp"]

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, in order of ranks; they may be any that pickle takes. A collective of all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first(self, value: Any) -> Any:
        """The value of rank 0. A collective of all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)


def build_mesh(dims: ParallelConfig, device_type: str) -> DeviceMesh:
    """The mesh of the current process group, with the axes AXES. UserError where the group has another number of ranks
    than `dims`."""
    dims.check_world(dist.get_world_size(), "the process group")
    sizes = tuple(getattr(dims, axis) for axis in AXES)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def backend(device_type: str) -> str:
    """The library of the collectives: gloo for CPUs, beside it NCCL for GPUs. UserError where torch lacks it."""
    if device_type == "cpu":
        return "gloo"
    if not dist.is_nccl_available():
        raise UserError(
            "train.parallel: this torch is built without NCCL, by which GPUs exchange tensors; install a build of torch"
            " for CUDA, or give train.device=cpu"
        )
    return "cpu:gloo,cuda:nccl"


def check_devices(dims: ParallelConfig, device_type: str, gpus_per_run: int | None = None) -> None:
    """UserError where this machine, which is to run all ranks, has fewer GPUs than a run takes, or no NCCL.
    gpus_per_run: the GPUs that the ranks share; None is one for each."""
    if dims.world == 1 or device_type == "cpu":
        return
    backend(device_type)
    there = torch.cuda.device_count()
    if gpus_per_run is not None and there < gpus_per_run:
        raise UserError(f"engine.gpus_per_run: {gpus_per_run}, but this machine has {there} GPUs; give {there} or less")
    if gpus_per_run is None and there < dims.world:
        raise UserError(
            f"train.parallel: {dims.formula} asks for {dims.world} GPUs, one for each rank, and this machine has"
            f" {there}; lower one of them, give train.device=cpu or engine=slurm, or"
            f" engine.gpus_per_run={sharing_gpus(dims.world, there)} to try it out with several ranks on a GPU"
        )


def join(dims: ParallelConfig, device_type: str) -> Ranks:
    """Begin the process group of the ranks that a launcher has started (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT in the environment) and build the mesh. On GPUs the one of LOCAL_RANK becomes the current one; ranks
    whose machine has fewer GPUs share them.

    UserError where no launcher has started this process, NCCL is missing, or there is another number of ranks than
    `dims`.
    """
    if "RANK" not in os.environ:
        raise UserError(
            f"train.parallel: {dims.formula} asks for {dims.world} ranks, and this is one process; `hqsweep run` starts"
            " them, and so does torchrun"
        )
    dims.check_world(int(os.environ["WORLD_SIZE"]), "the launcher")
    name, device = backend(device_type), torch.device(device_type)
    if device_type == "cuda":
        device = take_gpu(int(os.environ["LOCAL_RANK"]))
    begin_process_group(name, timeout=timedelta(seconds=TIMEOUT_S))
    sharers = ranks_of_gpu(device) if device_type == "cuda" else [dist.get_rank()]
    stand_apart(sharers.index(dist.get_rank()))
    return Ranks(dims=dims, mesh=build_mesh(dims, device.type), device=device, per_gpu=len(sharers))
