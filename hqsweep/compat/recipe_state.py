"""TransformerEngine's RecipeState: which quantizers a recipe gives to the slots of a module, to read.

Modules here ask the recipe themselves, so a state is made to look at, and writing to it changes no module.
"""

from collections.abc import Sequence
from typing import Any

from hqsweep.compat.arguments import one_of
from hqsweep.compat.recipes import Recipe
from hqsweep.errors import UserError
from hqsweep.recipe.roles import QuantizerRole

SLOTS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
"""Mode -> the tensors of its slots, again and again, where no role says another."""


class RecipeState:
    """The quantizers of a recipe for num_quantizers slots of one mode, "forward" or "backward".

    roles: one for each slot; a slot without one, or with another tensor than its mode's, has the tensor of its place. A
    CustomRecipe's factory gets each role as it is, or None. device has no effect. UserError for delayed scaling, whose
    states belong to modules (DelayedStates), and for roles of another number.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Any = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        one_of("RecipeState", "mode", mode, tuple(SLOTS))
        if roles is not None and len(roles) != num_quantizers:
            raise UserError(f"RecipeState: {len(roles)} roles for {num_quantizers} quantizers; give one for each")
        if recipe.delayed():
            raise UserError("RecipeState: the states of DelayedScaling belong to modules; read module.states there")
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles

    @staticmethod
    def create(recipe: Recipe, **options: Any) -> "RecipeState":
        """RecipeState(recipe, **options)."""
        return RecipeState(recipe, **options)

    def make_quantizers(self) -> list[Any]:
        """One quantizer for each slot, or what a CustomRecipe's factory returns."""
        roles = [None] * self.num_quantizers if self.roles is None else self.roles
        if not self.recipe.custom():
            roles = [self._role(index, role) for index, role in enumerate(roles)]
        return [self.recipe.qfactory(role) for role in roles]

    def _role(self, index: int, role: QuantizerRole | None) -> QuantizerRole:
        names = SLOTS[self.mode]
        if role is not None and role.tensor_type in names:
            return role
        return QuantizerRole(tensor_type=names[index % len(names)])


Float8CurrentScalingRecipeState = MXFP8BlockScalingRecipeState = Float8BlockScalingRecipeState = RecipeState
NVFP4BlockScalingRecipeState = CustomRecipeState = RecipeState


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The multiple to which Fp8Padding pads the rows of each member under a recipe."""
    return recipe.quantization_alignment
