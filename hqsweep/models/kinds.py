"""Kind: what convert() asks of one kind of module, so that it knows none of them.

A converted module has, outside of its tree of modules and its state_dict, QuantizedModules for its products (PARTS):
the part of a linear is one, mlp.experts has two. They hold quantizers, states of delayed scaling and cached operands,
and no parameter: those stay where they are. The code that computes a part's product calls seen.note_call(part), and
gives what it returns through first_step.watched(part, y).
"""

from collections.abc import Sequence

from torch import nn

from hqsweep.nn.module import PARTS, QuantizedModule
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.validate import GemmModule


class Kind:
    """One kind of module. A subclass has no state, and all methods that raise NotImplementedError here."""

    name: str
    """As Conversion.modules says it."""
    option: str | None = None
    """The argument of convert() that takes or leaves modules of this kind; None: they are always taken."""

    def matches(self, module: nn.Module) -> bool:
        """Whether the module is of this kind, converted or not."""
        raise NotImplementedError

    def wanted(self, recipe: AnyRecipe) -> bool:
        """Whether modules of this kind are taken where the option says None."""
        return True

    def fault(self, module: nn.Module) -> str | None:
        """Why this module of the kind is not taken; None: it is."""
        return None

    def check(self, module: nn.Module, name: str) -> None:
        """UserError for a module that the recipe is for, and that must not be left as it is without a word."""

    def gemm_modules(self, module: nn.Module, name: str) -> Sequence[GemmModule]:
        """Its products, with names and shapes: one for each part."""
        raise NotImplementedError

    def parts(self, module: nn.Module, name: str, recipe: AnyRecipe) -> Sequence[QuantizedModule]:
        """Its parts by a recipe that counts no layers, for gemm_modules in order. Reads no values of parameters."""
        raise NotImplementedError

    def swap(self, module: nn.Module) -> None:
        """Have the module compute by its parts, which it has now. Must not fail."""
        raise NotImplementedError

    def restore(self, module: nn.Module) -> None:
        """Undo swap. Must not fail after check_restore."""
        raise NotImplementedError

    def check_restore(self, module: nn.Module) -> None:
        """UserError where restore cannot be done."""

    def swapped(self, model: nn.Module) -> None:
        """After every swap of a model that has modules of this kind."""

    def restored(self, model: nn.Module) -> None:
        """After every restore of a model that had modules of this kind."""


def parts_of(module: nn.Module) -> tuple[QuantizedModule, ...]:
    """The parts of a converted module; none of another one."""
    return module.__dict__.get(PARTS, ())
