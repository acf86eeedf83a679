"""Kind: what convert() asks of one kind of module, so that it needs to know none of them.

A converted module has, outside of its tree of modules and its state_dict, QuantizedModules for its products (PARTS):
the part of a linear is one, mlp.experts has two. They hold quantizers, states of delayed scaling and cached operands,
and no parameter; parameters stay in the module. The code that computes a part's product calls seen.note_call(part), and
passes its result through first_step.watched(part, y).
"""

from collections.abc import Sequence

from torch import nn

from hqsweep.nn.core.module import PARTS, QuantizedModule
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.validate import GemmModule


class Kind:
    """One kind of module. A subclass has no state, and implements all methods that raise NotImplementedError here."""

    name: str
    """The kind's name in Conversion.modules."""
    option: str | None = None
    """The argument of convert() that says whether modules of this kind are taken; None: they always are."""

    def matches(self, module: nn.Module) -> bool:
        """Whether the module is of this kind, converted or not."""
        raise NotImplementedError

    def wanted(self, recipe: AnyRecipe) -> bool:
        """Whether modules of this kind are taken if the option is None."""
        return True

    def fault(self, module: nn.Module) -> str | None:
        """Why this module of the kind is not taken; None: it is."""
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
