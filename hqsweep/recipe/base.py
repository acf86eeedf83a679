"""What every kind of recipe offers (AnyRecipe), and the change from one recipe to the next (Change)."""

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
        """The quantizer of each role of a model; None roles are left out."""

    def quantizer(self, role: QuantizerRole) -> HybridQuantizer:
        """The quantizer of one slot, for a recipe that does not count layers."""

    def entered(self) -> Self:
        """The recipe for one autocast(), in which its answers do not change."""

    @property
    def answers_of(self) -> object:
        """A value that is equal for two recipes where they give the same answers."""

    def check_boundary(self, role: QuantizerRole | None) -> None:
        """Ask, and give up, the quantizer of an output or the gradient of an input that nobody reads in codes."""

    def for_layers(self, layers: Sequence[int]) -> Self:
        """The same recipe for a model with these layers."""

    def to_config(self) -> dict[str, Any]:
        """Canonical text of the recipe without its schedule."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another recipe from some point of the training on."""

    at: int | float
    """The number of updates that are done before it, or, below 1, a fraction of all."""
    recipe: AnyRecipe

    @property
    def when(self) -> str:
        """`at` in words."""
        return f"after {self.at} updates" if self.at >= 1 else f"after {100 * self.at:g} % of the updates"
