"""What ranks do together, or not at all: an error of one is an error of all, so that none waits for it in vain."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from hqsweep.errors import UserError

T = TypeVar("T")


def is_many(group: Any = None) -> bool:
    """Whether there are several ranks in the group; None is all ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def rank_in(group: Any = None) -> int:
    """The rank of this process in the group; 0 where there is none."""
    return dist.get_rank(group) if is_many(group) else 0


def count_in(group: Any = None) -> int:
    """The number of ranks in the group; 1 where there is none."""
    return dist.get_world_size(group) if is_many(group) else 1


def gathered(value: Any, group: Any = None) -> list[Any]:
    """The value of each rank, in order; it may be any that pickle takes."""
    if not is_many(group):
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(function: Callable[[], T], group: Any = None) -> T:
    """What function() gives, on each rank. Where it raises on some ranks, all raise: those their own errors, the others
    a UserError with the words of the first."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:  # which the others are to know, whatever it is
        error = raised
    words = [None if error is None else str(error) or type(error).__name__]
    failed = [(rank, told[0]) for rank, told in enumerate(gathered(words, group)) if told[0] is not None]
    if error is not None:
        raise error
    if failed:
        raise UserError(f"rank {failed[0][0]}: {failed[0][1]}")
    return result


def by_first(function: Callable[[], T], group: Any = None) -> T:
    """What function() gives on the first rank, which runs it alone, on all; where it raises, all do."""
    first = rank_in(group) == 0
    result = together(lambda: function() if first else None, group)
    return gathered(result, group)[0]
