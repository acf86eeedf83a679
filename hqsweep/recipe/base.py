"""The interface of all recipes (AnyRecipe), QuantizerRole, the tensor and module it is asked for, and Change."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.roles import QuantizerRole


class AnyRecipe(Protocol):
    """A frozen value that gives every slot of a model its quantizer: a Recipe, or a CustomRecipe."""

    @property
    def gemm(self) -> str:
        """Mode of the products: exact, strict or native."""

    @property
    def schedule(self) -> "tuple[Change, ...]":
        """Later recipes of a training, in order."""

    def resolve(self, roles: Iterable[QuantizerRole | None]) -> dict[QuantizerRole, HybridQuantizer]:
        """Return role -> quantizer for the roles of a model; None roles are left out."""

    def quantizer(self, role: QuantizerRole) -> HybridQuantizer:
        """Return the quantizer of one slot, for a recipe that does not count layers."""

    def entered(self) -> Self:
        """Return the recipe for one autocast(), whose answers do not change."""

    @property
    def answers_of(self) -> object:
        """Equal for two recipes that give the same answers."""

    def check_boundary(self, role: QuantizerRole | None) -> None:
        """Ask for the quantizer of an output, or an input's gradient, without a low-precision reader, and discard
        it."""

    def for_layers(self, layers: Sequence[int]) -> Self:
        """Return the recipe for a model with these layers."""

    def to_config(self) -> dict[str, Any]:
        """Return the canonical text of the recipe without its schedule."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another recipe from some point of the training on."""

    at: int | float
    """The updates before it, or, below 1, a fraction of all updates."""
    recipe: AnyRecipe

    @property
    def when(self) -> str:
        """`at` in words."""
        return f"after {self.at} updates" if self.at >= 1 else f"after {100 * self.at:g} % of the updates"
