"""DTensors, the tensors that ranks share: this rank's part, the whole, and new DTensors with the same placements.

Elementwise arithmetic runs on parts, which are plain tensors; only a sum over elements needs other ranks.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.parallel.wire.collectives import gather_bytes
from hqsweep.torch_private import BROADCASTS_PARAMETERS, dtensor_like, foreach_norm, local_tensor


def first_broadcast() -> tuple[Any, int] | None:
    """While DistributedDataParallel is being built: its process group, and the rank whose parameters all ranks get.

    None at any other time.
    """
    frame = sys._getframe(1) if dist.is_available() and dist.is_initialized() else None
    while frame is not None:
        if frame.f_code.co_name == BROADCASTS_PARAMETERS and frame.f_globals["__name__"].startswith("torch."):
            return frame.f_locals["process_group"], frame.f_locals["src"]
        frame = frame.f_back
    return None


def is_spread(x: Tensor) -> bool:
    """Whether x is a DTensor. Does not import DTensor's module: a process that has made one has it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, as a view that writes reach; x itself where x is no DTensor."""
    return local_tensor(x) if is_spread(x) else x


def spread_like(p: Tensor, part: Tensor) -> Tensor:
    """The DTensor with p's shape, strides and placements whose part on this rank is `part`; `part` itself where p is no
    DTensor."""
    if not is_spread(p):
        return part
    kind, mesh = type_of_spread(), p.device_mesh
    if part.device.type != mesh.device_type and not part.is_meta:  # an offloaded shard: from_local would move it
        return dtensor_like(p, part)
    return kind.from_local(part, mesh, p.placements, shape=p.shape, stride=p.stride(), run_check=False)


def spread_out(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as a DTensor with the placements of `like`.

    Returns `whole` itself where `like` is no DTensor.
    """
    if not is_spread(like):
        return whole
    if not is_in_pieces(like):
        distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
        return distribute(whole, like.device_mesh, like.placements, src_data_rank=None)
    part, mesh = whole, like.device_mesh
    for axis, dim, runs in _cuts(like):
        pieces = part.unflatten(dim, (runs, -1)).chunk(mesh.size(axis), dim + 1)
        rank = mesh.get_local_rank(axis)
        own = pieces[rank] if rank < len(pieces) else pieces[0].narrow(dim + 1, 0, 0)
        part = own.flatten(dim, dim + 1)
    return spread_like(like, part.clone(memory_format=torch.contiguous_format))


def is_in_pieces(x: Tensor) -> bool:
    """Whether a rank's part is something that torch's placements cannot name.

    Such a part consists of several pieces that are apart in the whole, such as the rows of q, k and v, or is one of
    unequal parts of a part, such as experts that fully_shard cuts unevenly. torch.distributed.checkpoint has no name
    for either.
    """
    if not is_spread(x):
        return False
    cuts = _cuts(x)
    ranks = {dim: math.prod(x.device_mesh.size(axis) for axis, other, _ in cuts if other == dim) for _, dim, _ in cuts}
    of_parts = {dim for _, dim, _ in cuts if sum(other == dim for _, other, _ in cuts) > 1}
    return any(runs > 1 for _, _, runs in cuts) or any(x.shape[dim] % ranks[dim] for dim in of_parts)


def _cuts(x: Tensor) -> list[tuple[int, int, int]]:
    """(axis of the mesh, axis of x, number of pieces that are cut separately) of each cut of a DTensor, outer cuts
    first.

    Where two cuts are along one axis of x, fully_shard made the one that comes first in the mesh. It lies within the
    other cut's part, and divides it as torch.chunk does. torch calls it a _StridedShard, which names the same rows only
    where the other part has no pieces.
    """
    cuts = [(axis, cut) for axis, cut in enumerate(x.placements) if not cut.is_replicate()]
    last = {cut.dim: axis for axis, cut in cuts}
    outer = [(axis, cut.dim, getattr(cut, "split_factor", 1)) for axis, cut in cuts if last[cut.dim] == axis]
    return outer + [(axis, cut.dim, 1) for axis, cut in cuts if last[cut.dim] != axis]


def whole_tensor(x: Tensor) -> Tensor:
    """All of x, on every rank; x itself where x is no DTensor. A collective.

    Parts in pieces are joined here, because DTensor.full_tensor() does not know them in torch 2.11.
    """
    if not is_spread(x):
        return x
    if not is_in_pieces(x):
        return x.full_tensor()
    joined, cuts = x.to_local(), _cuts(x)
    for index, (axis, dim, runs) in reversed(list(enumerate(cuts))):
        ranks = x.device_mesh.size(axis)
        size = x.shape[dim] // math.prod(x.device_mesh.size(other) for other, d, _ in cuts[:index] if d == dim)
        missing = -(-size // ranks) - joined.shape[dim]
        if missing:
            joined = torch.nn.functional.pad(joined, [0, 0] * (joined.dim() - 1 - dim) + [0, missing])
        parts = gather_bytes(joined, x.device_mesh.get_group(axis)).view(joined.dtype).unbind()
        pieces = [part.chunk(runs, dim) for part in parts]
        joined = torch.cat([piece for of_ranks in zip(*pieces, strict=True) for piece in of_ranks], dim)
        joined = joined.narrow(dim, 0, size)
    return joined


def part_as(p: Tensor, x: Tensor) -> Tensor:
    """This rank's part of x with the placements of p. x may be a gradient to which every rank has a summand."""
    if is_spread(x) and is_spread(p) and x.placements != p.placements:
        x = x.redistribute(placements=p.placements)
    return local(x)


def type_of_spread() -> Any:
    """The class DTensor. Only for a process that has imported it."""
    return sys.modules["torch.distributed.tensor"].DTensor


def shard_groups(x: Tensor) -> tuple[Any, ...]:
    """The process groups along the axes of the mesh that cut x; () where x is whole."""
    if not is_spread(x):
        return ()
    return tuple(x.device_mesh.get_group(i) for i, placement in enumerate(x.placements) if not placement.is_replicate())


def group_of_shards(x: Tensor) -> Any:
    """The process group along the first axis of the mesh that cuts x, which is fully_shard's if it did; None where x is
    whole."""
    return next(iter(shard_groups(x)), None)


def write_held(p: Tensor, value: Tensor, key: Any) -> None:
    """Quantize `value` into this rank's part of a held weight, under a key. A collective of the ranks that share the
    weight."""
    own = local(p)
    own.quantize_(value.view(own.shape), key=key, group=group_of_shards(p))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """float32 []: the 2-norm of all elements of all tensors, equal on all ranks. DTensors count as wholes."""
    return squared_norms(tensors).sum().sqrt()


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """float32 [tensors]: the square of each tensor's 2-norm, equal on all ranks. DTensors count as wholes.

    Squares are summed within each part, then over ranks, in one collective for all tensors with the same cuts.
    """
    norms = foreach_norm([local(x) for x in tensors], dtype=torch.float32)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, x in enumerate(tensors):
        alike.setdefault(shard_groups(x), []).append(index)
    totals: dict[int, Tensor] = {}
    for groups, indices in alike.items():
        squares = torch.stack([norms[index] for index in indices]).square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        if len(alike) == 1:
            return squares
        totals.update(zip(indices, squares.unbind(), strict=True))
    # By slices, because indices would be copied from the host, which no CUDA graph can hold.
    return torch.stack([totals[index] for index in range(len(totals))])
