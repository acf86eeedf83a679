"""Classes that take the place of a user's class in a module, and give it back."""

from functools import cache
from typing import Any

from torch import nn

PLAIN = "_hqsweep_plain"
"""Attribute of a swapped class: the class whose place it takes."""


@cache
def swapped_class(converted: type, plain: type) -> type[nn.Module]:
    """The class of `converted` on top of `plain`: one for each pair, since torch.compile guards classes."""
    contents = {"__reduce__": _reduce, "__module__": converted.__module__, PLAIN: (converted, plain)}
    return type(f"{converted.__name__}[{plain.__name__}]", (converted, plain), contents)


def plain_class(swapped: type) -> type | None:
    """The class whose place this one takes; None for any other, also for one that was derived from a swapped one."""
    pair = swapped.__dict__.get(PLAIN)
    return pair and pair[1]


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return _rebuilt, getattr(type(module), PLAIN), module.__getstate__()


def _rebuilt(converted: type, plain: type) -> nn.Module:
    made = swapped_class(converted, plain)
    return made.__new__(made)
