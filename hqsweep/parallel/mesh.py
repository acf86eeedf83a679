"""Ranks: the processes of one training, where they stand in the mesh, and what they exchange.

A training asks its Ranks for everything that needs other processes. `Ranks.alone` answers for a training in one
process, so that the training loop has one path for both. Axes of the mesh have the names of torchtitan.

Rank 0 joins the error statistics of a sampled step from the probes of all ranks, in order of ranks. Parts of a matrix
are joined to the whole first. Then tokens of data-parallel ranks follow each other, like tokens of microbatches, and
the layers and experts of other ranks are added. One gather serves all rows of a step.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hqsweep.config.train import ONE_RANK, ParallelConfig, sharing_gpus
from hqsweep.errors import UserError
from hqsweep.nn.core.probe import Key, Probe, Sample, is_of_step, rows_of
from hqsweep.parallel.wire import collectives
from hqsweep.parallel.wire.collectives import agree, gather_to_first
from hqsweep.parallel.wire.local import spread_out, whole_tensor
from hqsweep.parallel.wire.spawn import begin_process_group, ranks_of_gpu, stand_apart, take_gpu
from hqsweep.torch_private import flattened, tree_map_only

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes of the mesh, from the outermost to the innermost. Neighbours exchange the most, so they share a node."""
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "tp")
TIMEOUT_S = 1800.0
"""Seconds that a rank waits for the others, for instance for one that writes a state. It does not wait for a rank that
has ended."""
Trained = tuple[nn.Module, torch.optim.Optimizer]
"""A model and its optimizer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranks:
    """The ranks of one training, seen from one of them. Methods that exchange something are collectives of all
    ranks."""

    dims: ParallelConfig
    mesh: DeviceMesh | None
    """The mesh with the axes AXES; None for a rank alone."""
    device: torch.device
    per_gpu: int = 1
    """How many ranks share this rank's GPU."""

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
        """The index of this rank's part of a step's batch, from 0 to data_size - 1. Ranks along tp and pp share it."""
        return self._data_mesh.get_local_rank()

    @property
    def data_size(self) -> int:
        """The number of parts that a step's batch has."""
        return self.dims.data

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh that fully_shard takes: [dp_shard], with copies [dp_replicate, dp_shard]."""
        if self.dims.dp_replicate == 1:
            return self.mesh["dp_shard"]
        return self.mesh["dp_replicate", "dp_shard"]

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that compute the same part of the model on other sequences, in order of data_rank."""
        return self._data_mesh.get_group()

    @cached_property
    def _data_mesh(self) -> DeviceMesh:
        return flattened(self.mesh["dp_replicate", "dp_shard"], "dp")

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks with the axes EXPERT_AXES. dp_shard is divided into ep neighbours, which share out the
        experts, and efsdp ranks, which share out the parameters of the same experts."""
        dims = self.dims
        sizes = (dims.pp, dims.dp_replicate, dims.dp_shard // dims.ep, dims.ep, dims.tp)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=EXPERT_AXES)

    @cached_property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The mesh that fully_shard takes for experts: the ranks that hold the same experts."""
        if self.dims.dp_replicate == 1:
            return self.expert_mesh["efsdp"]
        return self.expert_mesh["dp_replicate", "efsdp"]

    @classmethod
    def alone(cls, device: torch.device) -> "Ranks":
        """The one rank of a training in one process. Nothing is exchanged, and no process group has to exist."""
        return _Alone(dims=ONE_RANK, mesh=None, device=device)

    def say(self, sentence: str) -> None:
        """Print a line, on rank 0 alone."""
        if self.is_first:
            print(sentence, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, in order of ranks. Values may be any that pickle takes. A collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather_to_first(self, value: Any) -> list[Any] | None:
        """The value of each rank, on rank 0; None on others. Tensors arrive on the CPU. A collective."""
        return gather_to_first(value)

    def first(self, value: Any) -> Any:
        """The value of rank 0. A collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def agree(self, values: Callable[[], Mapping[str, object]]) -> None:
        """Raise Disagreement on all ranks where the ranks' values() differ: JSON values by name. A collective."""
        agree(values())

    def largest(self, value: Tensor) -> None:
        """Replace a tensor, element by element, by the maximum over all ranks. A collective."""
        dist.all_reduce(value, dist.ReduceOp.MAX)

    def in_order(self, value: Tensor) -> Tensor:
        """[data_size, ...]: the value [...] of each rank with other sequences, in order of data_rank. A collective."""
        every = value.new_empty((self.data_size, *value.shape))
        collectives.all_gather(every.view(-1), value.reshape(-1).contiguous(), group=self.data_group)
        return every

    def whole(self, tree: Any) -> Any:
        """A nest of dicts and lists in which every DTensor is a whole tensor. A collective."""
        return tree_map_only(Tensor, whole_tensor, tree)

    def parts_of(self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """A state of whole tensors, with this rank's parts in its entries "model" and "optimizer"."""
        own = model.state_dict()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        moments = {
            index: {name: _part(v, params[index]) if _is_of(v, params[index]) else v for name, v in entries.items()}
            for index, entries in state["optimizer"]["state"].items()
        }
        return dict(state) | {
            "model": {name: _part(value, own.get(name)) for name, value in state["model"].items()},
            "optimizer": state["optimizer"] | {"state": moments},
        }

    def whole_model(self, own: Trained, build: Callable[[], Trained]) -> Trained:
        """Return a model and optimizer of whole tensors: build()'s, or `own` for a rank alone."""
        return build()


class _Alone(Ranks):
    """Ranks.alone: the same answers without a mesh. Values go through untouched, and nothing is copied."""

    rank = data_rank = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_to_first(self, value: Any) -> list[Any] | None:
        return [value]

    def first(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        pass

    def agree(self, values: Callable[[], Mapping[str, object]]) -> None:
        pass

    def largest(self, value: Tensor) -> None:
        pass

    def in_order(self, value: Tensor) -> Tensor:
        return value[None]

    def whole(self, tree: Any) -> Any:
        return tree

    def parts_of(self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(state)

    def whole_model(self, own: Trained, build: Callable[[], Trained]) -> Trained:
        return own


def _is_of(value: object, p: Tensor) -> bool:
    """Whether an entry of an optimizer's state has an element for each element of a parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _part(value: Tensor, like: Tensor | None) -> Tensor:
    """This rank's part of a whole tensor, cut as `like` is; the tensor itself where `like` is whole."""
    return value if like is None else spread_out(value.to(like.device), like)


def build_mesh(dims: ParallelConfig, device_type: str) -> DeviceMesh:
    """The mesh of the current process group, with the axes AXES. UserError where the group's size differs from
    `dims`."""
    dims.check_world(dist.get_world_size(), "the process group")
    sizes = tuple(getattr(dims, axis) for axis in AXES)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def backend(device_type: str) -> str:
    """The libraries of the collectives: gloo for CPUs, and NCCL too for GPUs. UserError where torch lacks NCCL."""
    if device_type == "cpu":
        return "gloo"
    if not dist.is_nccl_available():
        raise UserError(
            "train.parallel: this torch is built without NCCL, by which GPUs exchange tensors; install a build of torch"
            " for CUDA, or give train.device=cpu"
        )
    return "cpu:gloo,cuda:nccl"


def check_devices(dims: ParallelConfig, device_type: str, gpus_per_run: int | None = None) -> None:
    """UserError where this machine, which runs all ranks, has fewer GPUs than a run takes, or no NCCL.
    gpus_per_run: the number of GPUs that the ranks share; None: one for each rank."""
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


def join(dims: ParallelConfig, device: torch.device) -> Ranks:
    """Return the Ranks of this training: alone if `dims` is one rank, else all ranks of the launcher.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, begins the process group and
    builds the mesh. On GPUs, the GPU of LOCAL_RANK becomes the current one; ranks share GPUs where a machine has fewer.

    UserError without a launcher, without NCCL, or if the launcher gives another number of ranks than `dims`.
    """
    if dims.world == 1:
        return Ranks.alone(device)
    if "RANK" not in os.environ:
        raise UserError(
            f"train.parallel: {dims.formula} asks for {dims.world} ranks, and this is one process; `hqsweep run` starts"
            " them, and so does torchrun"
        )
    dims.check_world(int(os.environ["WORLD_SIZE"]), "the launcher")
    name = backend(device.type)
    if device.type == "cuda":
        device = take_gpu(int(os.environ["LOCAL_RANK"]))
    begin_process_group(name, timeout=timedelta(seconds=TIMEOUT_S))
    sharers = ranks_of_gpu(device) if device.type == "cuda" else [dist.get_rank()]
    stand_apart(sharers.index(dist.get_rank()))
    return Ranks(dims=dims, mesh=build_mesh(dims, device.type), device=device, per_gpu=len(sharers))


def axis_of(mesh: DeviceMesh, name: str, where: str) -> DeviceMesh:
    """The axis of that name, or the only one. UserError, beginning with `where`, for several axes without it."""
    axes = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh
    if name not in axes:
        raise UserError(f"{where}: the mesh has axes {axes}; it takes one that is named '{name}', or one axis")
    return mesh[name]


def peers(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """The process group of all ranks with this rank's index along an axis. Without another axis it is this rank."""
    place = axis_of(mesh, name, "mesh").get_local_rank()
    axis = 0 if mesh.ndim == 1 else mesh.mesh_dim_names.index(name)
    return dist.new_group(mesh.mesh.select(axis, place).flatten().tolist(), use_local_synchronization=True)


Samples = Mapping[Key, Sample]


def rows_of_all(probe: Probe, ranks: Ranks) -> list[dict[str, object]]:
    """The rows of the probes of all ranks, on rank 0; [] on others. A collective, also for ranks without a sample."""
    every = ranks.gather_to_first(probe.samples)
    if every is None:
        return []
    total = joined(every, ranks.dims.tp)
    return rows_of(probe.step, {key: sample.to(ranks.device) for key, sample in total.items()})


def captured_of_all(probe: Probe, ranks: Ranks) -> dict[str, Tensor]:
    """The whole operands that the probes of all ranks have captured, on rank 0; {} on others. A collective."""
    every, whole = ranks.gather_to_first(probe.operands) or [], {}
    for first in range(0, len(every), ranks.dims.tp):
        sharing = every[first : first + ranks.dims.tp]
        for name, (matrix, part) in sharing[0].items():
            if name not in whole:
                whole[name] = matrix if part is None else _put_together([own[name].matrix for own in sharing], *part)
    return whole


def _put_together(parts: Sequence[Tensor], axis: int, runs: int) -> Tensor:
    """The matrix that the ranks' parts form. runs: the number of pieces of each part, which alternate with other
    ranks'."""
    pieces = zip(*(part.chunk(runs, axis) for part in parts), strict=True)
    return torch.cat([piece for run in pieces for piece in run], axis)


def joined(samples: Sequence[Samples], tp: int) -> Samples:
    """One sample for each row, from the samples of all ranks. tp: how many neighbours share matrices and have the same
    tokens.

    Samples of weights are equal on all ranks that have one, and count once.
    """
    total: dict[Key, Sample] = {}
    for first in range(0, len(samples), tp):
        for key, sample in _joined_parts(samples[first : first + tp]):
            _, name, direction = key
            if key not in total:
                total[key] = sample
            elif not is_of_step(name):
                total[key] = total[key].joined(sample, direction)
    return total


def _joined_parts(samples: Sequence[Samples]) -> Iterable[tuple[Key, Sample]]:
    """The samples of ranks that share matrices. Parts are joined; samples that each rank has whole count once."""
    for key in dict.fromkeys(key for own in samples for key in own):
        whole, *others = (own[key] for own in samples if key in own)
        for part in others:
            if whole.cut is not None:
                whole = whole.joined(part, key[2], whole.cut)
        yield key, whole
