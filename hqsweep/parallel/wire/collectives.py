"""Collectives on plain tensors and on Python objects.

Results on tensors depend neither on the backend nor on the number of ranks. Objects are gathered and checked to be
equal. An error of one rank becomes an error of all ranks, so that no rank waits for it in vain. Without a process
group the functions answer for one rank.
"""

import hashlib
import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.torch_private import foreach_copy_

T = TypeVar("T")


class Disagreement(UserError):
    """The ranks of a run disagree on their work. Every rank raises the same sentence."""


def is_many(group: ProcessGroup | None = None) -> bool:
    """Whether the group has several ranks; None is all ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def rank_in(group: ProcessGroup | None = None) -> int:
    """The rank of this process in the group; 0 without a group."""
    return dist.get_rank(group) if is_many(group) else 0


def count_in(group: ProcessGroup | None = None) -> int:
    """The number of ranks in the group; 1 without a group."""
    return dist.get_world_size(group) if is_many(group) else 1


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The value of each rank, in order of ranks. Values may be any that pickle takes. A collective."""
    if not is_many(group):
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """The result of function() on each rank. A collective.

    Where it raises on some ranks, all ranks raise: these ranks their own error, the others a UserError with the words
    of the first.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as raised:  # any error at all, since the others have to know of it
        error = raised
    words = [None if error is None else str(error) or type(error).__name__]
    failed = [(rank, theirs[0]) for rank, theirs in enumerate(gathered(words, group)) if theirs[0] is not None]
    if error is not None:
        raise error
    if failed:
        raise UserError(f"rank {failed[0][0]}: {failed[0][1]}")
    return result


def by_first(function: Callable[[], T], group: ProcessGroup | None = None) -> T:
    """The result of function() on the first rank, which alone calls it, returned on all. Where it raises, all do."""
    first = rank_in(group) == 0
    result = together(lambda: function() if first else None, group)
    return gathered(result, group)[0]


def agree(values: Mapping[str, object]) -> None:
    """Raise Disagreement on all ranks where the ranks' values differ. A collective of all ranks.

    values: JSON values by name, the same names in the same order on all ranks. Only their hashes travel. The sentence
    names the first value that differs, and the ranks.
    """
    own = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in values.items()
    }
    every = gathered(own)
    for name in values:
        digests = [theirs.get(name, "missing") for theirs in every]
        if len(set(digests)) > 1:
            raise Disagreement(_sentence(name, digests))


def _sentence(name: str, digests: list[str]) -> str:
    common = Counter(digests).most_common(1)[0][0]
    odd = [rank for rank, value in enumerate(digests) if value != common]
    listed = ", ".join(map(str, odd[:8])) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
    which = f"ranks {listed} have" if len(odd) > 1 else f"rank {listed} has"
    return (
        f"train.parallel: the ranks disagree in {name}: {which} {digests[odd[0]][:10]}, the others {common[:10]}"
        " (hashes); give all nodes the same package, config and data"
    )


class _Apart(pickle.Pickler):
    """Pickles an object without the values of its tensors, and lists these tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if type(value) is not Tensor:
            return None
        self.tensors.append(value.detach())
        return value.dtype, tuple(value.shape)


class _Together(pickle.Unpickler):
    """Unpickles such an object, and takes the values of its tensors from bytes in the order of the list."""

    def __init__(self, data: bytes, values: Tensor) -> None:
        super().__init__(io.BytesIO(data))
        self.values = values

    def persistent_load(self, about: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        dtype, shape = about
        own, self.values = self.values.tensor_split([math.prod(shape) * dtype.itemsize])
        return own.clone().view(dtype).view(shape)  # a view has to begin at a multiple of its items, a clone does


def gather_to_first(value: Any) -> list[Any] | None:
    """The value of each rank, in order of ranks, on rank 0; None on others. A collective of all ranks.

    value: any that pickle takes. Its tensors arrive on the CPU. They leave a GPU in one copy, because pickle alone
    takes 0.1 ms or more for each tensor.
    """
    first = dist.get_rank() == 0
    values: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(_packed(value), values)
    return values and [_Together(data, torch.from_numpy(tensors)).load() for data, tensors in values]


def _packed(value: Any) -> tuple[bytes, Any]:
    """The pickle of an object, and the bytes of its tensors, uint8 [bytes] of numpy."""
    file = io.BytesIO()
    pickler = _Apart(file)
    pickler.dump(value)
    # as_strided, because view() takes the stride of an axis with one element for a gap
    parts = [x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8) for x in pickler.tensors]
    joined = torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0, dtype=torch.uint8)
    return file.getvalue(), joined.cpu().numpy()


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The collectives under their names since torch 2.13, or under the earlier names."""


def begin(collective: Callable[..., Any], *tensors: Any, group: ProcessGroup | None) -> Callable[[], None]:
    """Start collective(*tensors, group=group), and return a function that waits for it.

    The collective runs on its own stream where the backend has one, beside the work that follows. On GPUs the stream
    waits, not the host. While torch.compile traces, the collective is waited for at once.
    """
    if torch.compiler.is_compiling():
        collective(*tensors, group=group)
        return lambda: None
    work = collective(*tensors, group=group, async_op=True)
    return lambda: None if work is None else work.wait()


def maximum_(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Replace float32 tensors of amaxes (>= 0), in place, by their maximum over the ranks; NaN counts as 0.

    One all-reduce of one flat buffer. All ranks give tensors of the same shapes. The host does not wait.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat.nan_to_num_(0.0, posinf=torch.inf)  # whether backends keep a NaN depends on the order of ranks
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    foreach_copy_(list(tensors), [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])


def largest_bytes_(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> None:
    """Replace each byte of each tensor, in place, by its maximum over the ranks, in one all-reduce.

    Where every rank has written its part of a tensor, and zeros elsewhere, all ranks then have the whole.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    for tensor, own in zip(tensors, flat.split([t.numel() * t.element_size() for t in tensors]), strict=True):
        tensor.copy_(own.clone().view(tensor.dtype).view(tensor.shape))


def gather_bytes(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """uint8 [ranks, ..., bytes of the last axis]: the bytes of every rank's x. All ranks give one shape and dtype.

    gloo takes no float8, but moves bytes unchanged.
    """
    return begin_gather_bytes(x, group)()


def begin_gather_bytes(x: Tensor, group: ProcessGroup | None = None) -> Callable[[], Tensor]:
    """Start gather_bytes; the returned function waits and gives its result."""
    own = x.contiguous().view(torch.uint8)
    every = torch.empty((dist.get_world_size(group), *own.shape), dtype=torch.uint8, device=own.device)
    wait = begin(all_gather, every.view(-1, *own.shape[1:]), own, group=group)

    def result() -> Tensor:
        wait()
        return every

    return result


def ordered_reduce_scatter(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """float32 [n, ...]: this rank's part of the sum over ranks of x [ranks * n, ...], added in float32 in order of
    ranks.

    The parts travel in x's dtype. The sum has the bits of one process that adds the slices one after the other; a ring
    adds each part in another order. UserError for rows that the ranks do not divide.
    """
    world = dist.get_world_size(group)
    if x.dim() < 1 or x.shape[0] % world:
        raise UserError(f"ordered_reduce_scatter: {tuple(x.shape)} has no first axis that {world} ranks divide")
    arrived = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(arrived, x.contiguous(), group=group)
    first, *others = arrived.view(world, x.shape[0] // world, *x.shape[1:]).unbind()
    total = first.to(torch.float32, copy=True)
    for part in others:
        total += part.float()
    return total
