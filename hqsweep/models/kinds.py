"""A kind of module that convert() takes: what convert() asks of it, and how the class of a module is swapped.

A converted module has QuantizedModules for its products (PARTS), outside of its tree of modules and its state_dict: the
part of a linear is one, mlp.experts has two. Parts hold quantizers, states of delayed scaling and cached operands, and
no parameter; parameters stay in the module. The code that computes a part's product calls first_step.note_call(part),
and passes its result through first_step.watched(part, y).

With the class swapped, state_dict, parameters, ties, hooks, copies and isinstance are unchanged. A parameter of another
class would break ties and be replaced by load_state_dict(assign=True). A `forward` in the instance would, in a copy of
the module, go on computing with the original.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from hqsweep.errors import UserError
from hqsweep.nn.core.module import PARTS, QuantizedModule
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import GemmModule


class Kind:
    """One kind of module. A subclass has no state, and implements all methods that raise NotImplementedError here."""

    name: str
    """The kind's name in Conversion.modules."""
    option: str | None = None
    """The argument of convert() that decides whether modules of this kind are taken; None: they always are."""

    def matches(self, module: nn.Module) -> bool:
        """Whether the module is of this kind, converted or not."""
        raise NotImplementedError

    def wanted(self, recipe: AnyRecipe) -> bool:
        """Whether modules of this kind are taken if the option is None."""
        return True

    def fault(self, module: nn.Module) -> str | None:
        """Return why this module of the kind cannot be taken; None if it can."""
        return None

    def check(self, module: nn.Module, name: str) -> None:
        """UserError for a module that the recipe applies to, and that must not be skipped without a word."""

    def gemm_modules(self, module: nn.Module, name: str) -> Sequence[GemmModule]:
        """The module's products, with names and shapes: one for each part."""
        raise NotImplementedError

    def parts(self, module: nn.Module, name: str, recipe: AnyRecipe) -> Sequence[QuantizedModule]:
        """The module's parts by a recipe that counts no layers, in the order of gemm_modules. It reads no values of
        parameters."""
        raise NotImplementedError

    def held_fault(self, module: nn.Module, part: QuantizedModule) -> str | None:
        """Why the weight of a part, its `weight_name`, stays plain where weights are held quantized; None: it need
        not."""
        return None

    def swap(self, module: nn.Module) -> None:
        """Have the module compute by its parts, which it has by now. It must not fail."""
        raise NotImplementedError

    def restore(self, module: nn.Module) -> None:
        """Undo swap. It must not fail after check_restore."""
        raise NotImplementedError

    def check_restore(self, module: nn.Module) -> None:
        """UserError where restore cannot be done."""

    def swapped(self, model: nn.Module) -> None:
        """This is called after the swaps of a model that has modules of this kind."""

    def restored(self, model: nn.Module) -> None:
        """This is called after the restores of a model that had modules of this kind."""


def parts_of(module: nn.Module) -> tuple[QuantizedModule, ...]:
    """The parts of a converted module; () for any other."""
    return module.__dict__.get(PARTS, ())


PLAIN = "_hqsweep_plain"
"""The attribute of a swapped class itself: the class that computes by parts, and the class that both replace."""
FORWARD = "_old_forward"
"""The attribute of a module in which accelerate keeps its forward; another forward in the instance calls it."""


def swapped_class(converted: type, plain: type) -> type[nn.Module]:
    """The class of `converted` on top of `plain`; `converted` itself where it is made for `plain`. torch.compile guards
    classes, so there is one for each pair.

    torch's parametrizations give every module a class of its own. That class stays on top: torch adds and removes its
    properties, and takes its first base for the class without them.
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
    if FORWARD in module.__dict__:  # accelerate calls the forward that it found
        module.__dict__[FORWARD] = own.forward.__get__(module)
