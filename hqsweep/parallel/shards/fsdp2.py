"""Sharding: how torch's fully_shard gathers a held weight, as codes and scales of the direction that a pass reads.

torch calls pre() on a rank's shard before it gathers, and post() with the messages of all ranks. The whole tensor that
post() returns at first stays the parameter. torch frees its memory when it shards again, and later gathers fill it
anew. Forward fills the rowwise buffers. It saves the columnwise buffers without memory, and backward fills them.
"""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hqsweep.errors import UserError
from hqsweep.memo import constant_result, memo
from hqsweep.parallel.shards.fsdp_state import DIRECTIONS, allocate, free, is_free, served
from hqsweep.parallel.shards.shard import Cut, buffer_cuts
from hqsweep.parallel.wire import collectives
from hqsweep.torch_private import (
    fsdp_cuts_again,
    fsdp_extensions,
    fsdp_groups,
    fsdp_inner_tensors,
    fsdp_phase,
    fsdp_set_inner_tensors,
    fsdp_shard,
    fsdp_states,
    storage_id,
    unsafe_preserve_version_counter,
)

ONE_ARGUMENT = inspect.signature(lambda mesh: None)
"""A signature with one argument for pre(); torch asks for the signature in every pass."""
_TRACED: list[bool] = []
"""Not empty once torch.compile has traced a read of a held weight."""


@constant_result
def note_trace() -> None:
    """Note that torch.compile traces, which calls this function then, like every function of constants."""
    _TRACED[:] = [True]


class Sharding:
    """The gathers of a held weight. All of its shards on a rank, and its whole tensor, share one Sharding."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.recomputes = False
        """Whether backward has run forward again, which reads the rowwise operand."""
        self._parameter: Any = lambda: None  # weak: the engine's objects hold tensors that hold this Sharding
        self._group: Any = lambda: None
        self._mesh: DeviceMesh | None = None
        self._rank, self._cuts = 0, buffer_cuts(cut, 1)
        self._received: dict[str, Tensor] = {}
        self._bytes: dict[str, Tensor] = {}
        """The memory of each buffer of the whole, uint8, padded to a size that the ranks divide."""
        self._whole: dict[str, Tensor] = {}
        # The first pass notes what every pass needs, because the host takes long to derive it.
        self._passes: dict[tuple[str, ...], _Pass] = {}
        self._views: dict[str, tuple[Tensor, Tensor]] = {}
        self._sent: dict[str, tuple[Tensor, Tensor]] = {}

    def pre(self, shard: Any, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Return (messages, notes): this rank's messages for the next pass, and the facts that post() needs."""
        if not self._has_engine():
            raise UserError(
                f"fully_shard of torch {torch.__version__} keeps its parameters where hqsweep does not find them; it"
                " knows torch 2.11 to 2.15"
            )
        if (
            mesh is not self._mesh and self._ranks(mesh) == 1
        ):  # torch sends one input at most, and nothing has to be sent
            return (torch.zeros(1, dtype=torch.uint8, device=shard.device),), shard
        self._join(mesh)
        self._make_whole(shard.device)
        ahead, parameter = self._pass(self._directions()), self._parameter()
        if fsdp_cuts_again(self._group()) or self.cut.dim:
            take_over(parameter)
        # torch makes its outputs once, in the sizes of the first pass; another pass needs other sizes.
        parameter.all_gather_outputs = [*ahead.received]
        fsdp_set_inner_tensors(parameter, [*ahead.own])
        return tuple(_wide(own, own.numel()) for own in self._inputs(shard, ahead.names)), ahead

    def post(self, shard: Any, notes: Any, dtype: torch.dtype, *, is_first: bool) -> tuple[Any, list[Tensor]] | None:
        """Fill the buffers. At torch's first gather, returns the whole tensor and the memory that torch frees when it
        shards."""
        if isinstance(notes, _Pass):
            if notes.is_apart:
                self._gather(notes.names)
            else:
                self._fill(notes.names)
            return (self._tensor(shard, dtype), [*notes.own]) if is_first else None
        buffers = {name: buffer for name, buffer in notes.buffers.items() if name in self._cuts}
        if notes is shard or shard.device == notes.device:
            self._whole = buffers
            return self._tensor(shard, dtype), []
        if not self._whole:
            self._whole = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
        for name, buffer in buffers.items():
            _write(self._whole[name], lambda whole, source=buffer: whole.copy_(source))
        return self._tensor(shard, dtype), list(self._whole.values())

    def ready(self, direction: str) -> None:
        """Gather now a direction that a product is about to read, but the pass did not gather.

        This happens where backward runs forward again. Later steps then gather both directions.
        """
        absent = [name for name in self._names(direction) if is_free(self._whole[name])]
        if absent:
            self.recomputes = True
            self._gather(absent)

    def pieces(self, rank: int, ranks: int) -> dict[str, Tensor]:
        """The piece, in bytes, that this rank keeps after forward of each buffer that backward reads."""
        both = self._recomputes or not self._group().reshard_after_backward
        names = self._pass(DIRECTIONS if both else DIRECTIONS[1:]).names
        sizes = {name: self._bytes[name].numel() // ranks for name in names if not is_free(self._bytes[name])}
        return {name: self._bytes[name].narrow(0, rank * size, size).clone() for name, size in sizes.items()}

    def pre_of_pieces(self, kept: Mapping[str, Tensor]) -> tuple[list[Tensor], "_Pass"]:
        """pre() from the pieces that this rank has kept.

        Where the pass reads other buffers, as another forward does, nothing is sent here, and post() gathers from the
        shards.
        """
        ahead, parameter = self._pass(self._directions()), self._parameter()
        fsdp_set_inner_tensors(parameter, [])
        if fsdp_phase(self._group()) == "PRE_BACKWARD" and kept.keys() >= set(ahead.names):
            pieces = [kept[name] for name in ahead.names]
            sizes = [piece.numel() for piece in pieces]
            whole = [self._bytes[name] for name in ahead.names]
            parameter.all_gather_outputs = list(map(_wide, whole, sizes))
            return list(map(_wide, pieces, sizes)), _Pass([], [], [])
        one = torch.zeros(1, dtype=torch.uint8, device=parameter.device)
        parameter.all_gather_outputs = [one.repeat(parameter.post_forward_mesh_info.shard_mesh_size)]
        return [one], ahead._replace(is_apart=True)

    def _gather(self, names: Sequence[str]) -> None:
        """Gather buffers from the shards now, outside of torch's gather."""
        parameter = self._parameter()
        inputs = self._inputs(fsdp_shard(parameter).to(self._whole[names[0]].device), names)
        for name, own in zip(names, inputs, strict=True):
            allocate(self._received[name])
            with torch.no_grad(), unsafe_preserve_version_counter(self._received[name]):
                collectives.all_gather(self._received[name], own, group=self.group)
        self._fill(names)
        fsdp_inner_tensors(parameter).extend([self._received[name] for name in names] + self._own(names))

    @property
    def group(self) -> ProcessGroup | None:
        """The process group whose ranks hold the whole; None where one rank does, or before fully_shard."""
        if self._mesh is None and self._has_engine():
            mesh = self._parameter().shard_mesh
            if self._ranks(mesh) > 1:
                self._join(mesh)
        return None if self._mesh is None else self._mesh.get_group()

    def _directions(self) -> tuple[str, ...]:
        """The directions that the pass reads. Both, where a forward or a backward may follow without another gather."""
        group = self._group()
        if fsdp_cuts_again(group) and fsdp_phase(group) == "FORWARD":
            return DIRECTIONS  # pieces() keeps only the buffers that backward reads
        return served(group, repeats=False, recomputes=self._recomputes)

    @property
    def _recomputes(self) -> bool:
        """Whether backward may run forward again. A graph cannot ask, so it always may."""
        return self.recomputes or bool(_TRACED)

    def _pass(self, directions: tuple[str, ...]) -> "_Pass":
        if directions not in self._passes:
            names = list(dict.fromkeys(name for direction in directions for name in self._names(direction)))
            received = [_wide(self._received[name], self._cuts[name].nbytes) for name in names]
            self._passes[directions] = _Pass(names, received, self._own(names))
        return self._passes[directions]

    def _names(self, direction: str) -> list[str]:
        """The names of the buffers of a direction. An identity that is held once serves both directions."""
        stored = self.cut.metadata.stored
        held = direction if any(d == direction for d, _ in stored) else stored[0][0]
        return [f"{d}_{name}" for d, name in stored if d == held]

    def _join(self, mesh: DeviceMesh) -> None:
        """Note the ranks, because a mesh takes long to give their number, and every pass needs it."""
        if mesh is not self._mesh:
            self._mesh, self._rank, self._cuts = mesh, mesh.get_local_rank(), buffer_cuts(self.cut, mesh.size())

    def link(self, states: Any) -> None:
        """Have this rank's shard use the states of the whole; a group has states for each expert."""
        shard = fsdp_shard(self._parameter()) if self._has_engine() else None
        if isinstance(states, list) and shard is not None:
            first = shard.metadata.content.first - self.cut.metadata.content.first
            states = states[first : first + shard.metadata.content.count]
        if shard is not None:
            shard.states = states

    def _inputs(self, shard: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(self._packed(name, getattr(shard, name)) for name in names)

    def _packed(self, name: str, buffer: Tensor) -> Tensor:
        """The bytes of a buffer in order. It is noted where they are the buffer's own memory, which later writes
        reach."""
        known, packed = self._sent.get(name, (None, None))
        if known is buffer:
            return packed
        packed = self._cuts[name].pack(buffer, self._rank)
        if storage_id(packed) == storage_id(buffer):
            self._sent[name] = buffer, packed
        return packed

    def _make_whole(self, device: torch.device) -> None:
        """Make the buffers of the whole, without memory. Where the received bytes are in order, they are such a
        buffer."""
        if self._whole:
            return
        meta = self.cut.metadata
        for direction, buffer in meta.stored:
            name = f"{direction}_{buffer}"
            cut, (dtype, shape) = self._cuts[name], meta.buffer(direction, buffer)
            ranks, size = len(cut.spans), torch.Size(shape).numel() * dtype.itemsize
            self._received[name] = received = torch.empty(ranks * cut.nbytes, dtype=torch.uint8, device=device)
            padded = -(-size // ranks) * ranks
            self._bytes[name] = own = received if cut.in_place else received.new_empty(padded)
            self._whole[name] = own[:size].view(dtype).view(shape)
            for tensor in (received, own):
                free(tensor)

    def _fill(self, names: Sequence[str]) -> None:
        apart = [name for name in names if not self._cuts[name].in_place]
        if not apart:
            return
        for name in apart:
            allocate(self._bytes[name])
        with torch.no_grad(), unsafe_preserve_version_counter(tuple(self._whole[n] for n in apart)):
            for name in apart:
                self._unpack(name)
                free(self._received[name])

    def _unpack(self, name: str) -> None:
        cut, received, whole = self._cuts[name], self._received[name], self._whole[name]
        if not cut.even:
            cut.unpack(received, whole)
            return
        if name not in self._views:
            self._views[name] = cut.turned(received, whole)
        ordered, arrived = self._views[name]
        ordered.copy_(arrived)

    def _own(self, names: Sequence[str]) -> list[Tensor]:
        """The memory of buffers that is not the received memory."""
        return [self._bytes[name] for name in names if not self._cuts[name].in_place]

    def _tensor(self, shard: Any, dtype: torch.dtype) -> Any:
        whole = type(shard).of_whole(self._whole, self.cut, dtype)
        whole.planes, whole.states, whole.part = self, shard.states, shard.part
        return whole

    def _ranks(self, mesh: DeviceMesh) -> int:
        """The number of ranks that the tensor is cut over. torch may also give a mesh of ranks that all have the
        whole."""
        kind = type(getattr(self._parameter(), "mesh_info", None)).__name__
        return 1 if kind == "DDPMeshInfo" else mesh.size()

    def _has_engine(self) -> bool:
        """Whether the engine's objects of this tensor are known. They are searched until they are found once."""
        if self._parameter() is not None:
            return True
        for group in chain.from_iterable(map(fsdp_groups, fsdp_states())):
            for parameter in group.fsdp_params:
                if getattr(fsdp_shard(parameter), "sharding", None) is self:
                    self._parameter, self._group = weakref.ref(parameter), weakref.ref(group)
                    return True
        return False


class _Pass(NamedTuple):
    """The gather of one pass: the names of buffers, the memory received for each, and the buffers' own memory where the
    received bytes are not in order."""

    names: list[str]
    received: list[Tensor]
    own: list[Tensor]
    is_apart: bool = False
    """Whether post() gathers it, because torch does not."""


def with_sharding(x: Any, parts: list, cut: Cut) -> list:
    """The parts into which torch's fully_shard cuts a tensor, with a common Sharding."""
    x.sharding = Sharding(cut)
    for part in parts:
        part.sharding = x.sharding
    return parts


def _wide(tensor: Tensor, sent: int) -> Tensor:
    """The bytes as float32, where each rank sends a multiple of four, because torch copies messages element by
    element."""
    if sent % 4:
        return tensor
    return (tensor if tensor.storage_offset() % 4 == 0 else tensor.clone()).view(torch.float32)


def _write(tensor: Tensor, write: Any) -> None:
    """Write to a buffer without a new version, because backward may hold the tensor and reads the same values."""
    with torch.no_grad(), unsafe_preserve_version_counter(tensor):
        write(tensor)


def take_over(parameter: Any) -> None:
    """Turn torch's FSDPParam of a held weight, which is being gathered, into a HeldParam."""
    if not isinstance(parameter, HeldParam):
        parameter.__class__ = _held(type(parameter))
    parameter.is_gathered = True


class HeldParam:
    """An FSDPParam that asks the Sharding of its weight. torch's own class would take the weight for a plain tensor."""

    kept: Mapping[str, Tensor] = {}
    """The name of a buffer -> this rank's piece of it, between forward and backward."""
    is_gathered = False
    """Whether a gather has begun that torch still has to turn into the parameter."""

    @property
    def fsdp_placement(self) -> Any:
        """The cut of the parameter. It is Shard(0) while torch copies gathered bytes, which lie along axis 0."""
        own = self.__dict__["fsdp_placement"]
        return type(own)(0) if self.is_gathered else own

    def init_unsharded_param(self) -> None:
        """Make the parameter from the gathered bytes."""
        super().init_unsharded_param()
        self.is_gathered = False

    def to_sharded(self) -> None:
        """Make the shard the parameter."""
        self.kept = {}
        super().to_sharded()

    def to_unsharded(self) -> None:
        """Make the gathered weight the parameter."""
        self.kept = {}
        super().to_unsharded()

    def to_sharded_post_forward(self) -> None:
        """Make the shard the parameter, and keep pieces for backward."""
        mesh = self.post_forward_mesh_info
        pieces = fsdp_shard(self).sharding.pieces(mesh.shard_mesh_rank, mesh.shard_mesh_size)
        self.to_sharded()
        self.kept, self.sharded_state = pieces, type(self.sharded_state).SHARDED_POST_FORWARD

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The tensors that this rank sends."""
        if self.sharded_state is not type(self.sharded_state).SHARDED_POST_FORWARD:
            return super().all_gather_inputs
        self.is_gathered = True
        inputs, notes = fsdp_shard(self).sharding.pre_of_pieces(self.kept)
        fsdp_extensions(self).all_gather_metadata = notes
        fsdp_extensions(self).all_gather_input_sizes = [sent.size() for sent in inputs]
        return inputs


@memo
def _held(kind: type) -> type:
    """The subclass of an FSDPParam class that is a HeldParam."""
    return type(HeldParam.__name__, (HeldParam, kind), {})
