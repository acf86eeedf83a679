"""Tensors that ranks share, torch.distributed.tensor.DTensor: the part of this rank, and tensors that are spread alike.

Elementwise arithmetic is done on parts, which are plain tensors; only a sum over elements needs other ranks.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hqsweep.dist.collectives import gather_bytes
from hqsweep.errors import UserError


def first_broadcast() -> tuple[Any, int] | None:
    """The process group, and the rank in it whose parameters all ranks are to have, while DistributedDataParallel is
    being built; None at any other time."""
    frame = sys._getframe(1) if dist.is_available() and dist.is_initialized() else None
    while frame is not None:
        if frame.f_code.co_name == "_sync_params_and_buffers" and frame.f_globals["__name__"].startswith("torch."):
            return frame.f_locals["process_group"], frame.f_locals["src"]
        frame = frame.f_back
    return None


def is_spread(x: Tensor) -> bool:
    """Whether x is a DTensor; a process that has made one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's part of x, which writes reach; x itself where it is not spread."""
    return x._local_tensor if is_spread(x) else x


def spread_like(p: Tensor, part: Tensor) -> Tensor:
    """The DTensor of p's shape, strides and placements of which `part` is this rank's part; `part` itself where p is
    not spread."""
    if not is_spread(p):
        return part
    options = {"shape": p.shape, "stride": p.stride(), "run_check": False}
    return type_of_spread().from_local(part, p.device_mesh, p.placements, **options)


def spread_out(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, as a DTensor of this rank's part that is spread as `like` is; `whole` itself
    where `like` is not spread."""
    if not is_spread(like):
        return whole
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    return distribute(whole, like.device_mesh, like.placements, src_data_rank=None)


def is_in_pieces(x: Tensor) -> bool:
    """Whether a rank's part is several pieces that do not follow each other in the whole, as of q, k and v that are cut
    each for itself; torch.distributed.checkpoint has no name for those. UserError where fully_shard has cut the rows of
    such a part once more: torch's placements then name other rows than it has."""
    cuts = [placement for placement in x.placements if not placement.is_replicate()] if is_spread(x) else []
    last = {cut.dim: cut for cut in cuts}
    in_pieces = [cut for cut in last.values() if type(cut).__name__ == "_StridedShard"]
    if any(sum(other.dim == cut.dim for other in cuts) > 1 for cut in in_pieces):
        raise UserError(
            f"fully_shard has cut a weight {tuple(x.shape)} along rows of which tp gave each rank pieces, as of q, k"
            " and v, and which rows those are is lost; give fully_shard"
            " shard_placement_fn=hqsweep.parallel.tensor.fsdp_placement"
        )
    return bool(in_pieces)


def whole_tensor(x: Tensor) -> Tensor:
    """All of x, on every rank; x itself where it is not spread. A collective.

    DTensor.full_tensor() takes no pieces in torch 2.11, so these are joined here: they are of equal sizes on all ranks.
    """
    if not is_spread(x):
        return x
    if not is_in_pieces(x):
        return x.full_tensor()
    joined = x.to_local()
    for axis, placement in reversed(list(enumerate(x.placements))):  # the last cut is within those before it
        if placement.is_replicate():
            continue
        parts = gather_bytes(joined, x.device_mesh.get_group(axis)).view(joined.dtype).unbind()
        pieces = [part.chunk(getattr(placement, "split_factor", 1), placement.dim) for part in parts]
        joined = torch.cat([piece for of_ranks in zip(*pieces, strict=True) for piece in of_ranks], placement.dim)
    return joined


def part_as(p: Tensor, x: Tensor) -> Tensor:
    """This rank's part of x in the placements of p, where x may be a gradient of which every rank has a summand."""
    if is_spread(x) and is_spread(p) and x.placements != p.placements:
        x = x.redistribute(placements=p.placements)
    return local(x)


def type_of_spread() -> Any:
    """The class DTensor, in a process that has imported it."""
    return sys.modules["torch.distributed.tensor"].DTensor


def shard_groups(x: Tensor) -> tuple[Any, ...]:
    """The process groups over which the elements of x are cut, one for each such axis of its mesh."""
    if not is_spread(x):
        return ()
    return tuple(x.device_mesh.get_group(i) for i, placement in enumerate(x.placements) if not placement.is_replicate())


def write_held(p: Tensor, value: Tensor, key: Any) -> None:
    """Quantize this rank's part of a weight that is held quantized from its values, under a key; the ranks that share
    the weight call this together."""
    own = local(p)
    own.quantize_(value.view(own.shape), key=key, group=next(iter(shard_groups(p)), None))


_UPDATES = [0]


def note_update() -> None:
    """Count an update of DTensors. FSDP gathers weights anew after it into tensors that keep their version counters."""
    _UPDATES[0] += 1


def updates() -> int:
    """How many updates note_update() has counted in this process."""
    return _UPDATES[0]


def whole_group(x: Tensor) -> Any:
    """The process group whose ranks together hold all of x, each a part; None where x is not cut."""
    groups = shard_groups(x)
    if len(groups) < 2:
        return groups[0] if groups else None
    names = [
        n
        for n, placement in zip(x.device_mesh.mesh_dim_names, x.placements, strict=True)
        if not placement.is_replicate()
    ]
    return x.device_mesh[tuple(names)]._flatten().get_group()


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """float32 []: the 2-norm of all elements of all tensors, equal on all ranks; each DTensor counts as a whole."""
    return squared_norms(tensors).sum().sqrt()


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """float32 [tensors]: the square of each tensor's 2-norm, equal on all ranks; of a DTensor the whole counts.

    Squares are summed within each part, then over ranks, in one collective for all tensors that are cut alike.
    """
    norms = torch._foreach_norm([local(x) for x in tensors], dtype=torch.float32)
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
    # By slices, as indices would be a copy from the host, which no CUDA graph holds.
    return torch.stack([totals[index] for index in range(len(totals))])
