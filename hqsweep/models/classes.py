"""Classes that take the place of a user's class in a module, and give it back.

A parameter of another class would break ties and be replaced by load_state_dict(assign=True); a `forward` in the
instance would go on computing with the module that a copy was made of. With the class swapped, state_dict, parameters,
ties, hooks, copies and isinstance are unchanged.
"""

from functools import cache
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from hqsweep.errors import UserError
from hqsweep.models.kinds import Kind, parts_of

PLAIN = "_hqsweep_plain"
"""The attribute of a swapped class itself: the class that computes by parts, and the one whose place both take."""
FORWARD = "_old_forward"
"""The attribute of a module in which accelerate keeps its forward, which another one in the instance calls."""


def swapped_class(converted: type, plain: type) -> type[nn.Module]:
    """The class of `converted` on top of `plain`: one for each pair, since torch.compile guards classes; `converted`
    itself where it is made for `plain`.

    A class of torch's parametrizations, which every module has for itself, stays on top: torch adds and removes
    properties of it, and takes its first base for the class without them.
    """
    if not _is_parametrized(plain):
        return _swapped_class(converted, plain)
    own = {name: value for name, value in plain.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return type(plain.__name__, (swapped_class(converted, plain.__bases__[0]),), {**own, PLAIN: (converted, plain)})


def _is_parametrized(plain: type) -> bool:
    """Whether torch.nn.utils.parametrize made the class, for one module."""
    return getattr(plain.__dict__.get("__getstate__"), "__module__", None) == register_parametrization.__module__


@cache
def _swapped_class(converted: type, plain: type) -> type[nn.Module]:
    if plain_class(converted) is plain:
        return converted
    contents = {"__reduce__": _reduce, "__module__": converted.__module__, PLAIN: (converted, plain)}
    return type(f"{converted.__name__}[{plain.__name__}]", (converted, plain), contents)


def plain_class(swapped: type) -> type | None:
    """The class whose place this one takes; None for any other class, also for one that was derived from a swapped
    one."""
    pair = swapped.__dict__.get(PLAIN)
    return pair and pair[1]


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return _rebuilt, getattr(type(module), PLAIN), module.__getstate__()


def _rebuilt(converted: type, plain: type) -> nn.Module:
    swapped = swapped_class(converted, plain)
    return swapped.__new__(swapped)


class SwapKind(Kind):
    """A kind whose modules have their class swapped. A subclass sets `converted`."""

    converted: type
    """The class whose forward computes by parts."""

    def swap(self, module: nn.Module) -> None:
        _give_class(module, swapped_class(self.converted, type(module)))

    def restore(self, module: nn.Module) -> None:
        own = plain_class(type(module))
        if _is_parametrized(own):
            _take_properties(own, type(module))
        _give_class(module, own)

    def check_restore(self, module: nn.Module) -> None:
        if plain_class(type(module)) is None:
            raise UserError(
                f"{parts_of(module)[0].name}: {type(module).__name__} was made of the converted class afterwards, as"
                " parametrizations and FSDP do; undo that before revert"
            )


def _take_properties(own: type, swapped: type) -> None:
    """Parametrizations may have been added and removed while the class was swapped."""
    before, now = ({name: v for name, v in cls.__dict__.items() if isinstance(v, property)} for cls in (own, swapped))
    for name in before.keys() - now.keys():
        delattr(own, name)
    for name in now.keys() - before.keys():
        setattr(own, name, now[name])


def _give_class(module: nn.Module, own: type[nn.Module]) -> None:
    module.__class__ = own
    if FORWARD in module.__dict__:  # accelerate calls what it has found
        module.__dict__[FORWARD] = own.forward.__get__(module)
