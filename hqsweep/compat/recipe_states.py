"""RecipeState by TransformerEngine's name: the quantizers that a recipe gives to the slots of a module.

Modules here ask the recipe themselves, so a state is made to look at, and writing to it changes no module.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hqsweep.compat.arguments import one_of
from hqsweep.compat.built_in_recipes import DelayedScaling
from hqsweep.compat.quantizers import Float8Quantizer
from hqsweep.compat.recipes import DelayedScalingRequest, Recipe
from hqsweep.errors import UserError
from hqsweep.recipe.roles import QuantizerRole

SLOTS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
"""Mode -> the tensors of its slots, again and again, where no role says another."""
TENSORS = {tensor for tensors in SLOTS.values() for tensor in tensors}


class RecipeState:
    """The quantizers of a recipe for num_quantizers slots of one mode, "forward" or "backward".

    roles: one for each slot; a slot without one, or with another tensor than a linear's, has the tensor of its place. A
    CustomRecipe's factory gets each role as it is, or None. Slots of delayed scaling are Float8Quantizers, whose scales
    and amaxes are views of `scale` and `amax_history`. device: of these two. UserError for roles of another number.
    """

    scale: Tensor | None = None
    """float32 [slots of delayed scaling]; None before make_quantizers(), and without such slots."""
    amax_history: Tensor | None = None
    """float32 [amax_history_len, slots of delayed scaling]; quantizers write to row 0."""
    _inner_delayed_scaling_recipe: DelayedScaling | None = None

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        one_of("RecipeState", "mode", mode, tuple(SLOTS))
        if roles is not None and len(roles) != num_quantizers:
            raise UserError(f"RecipeState: {len(roles)} roles for {num_quantizers} quantizers; give one for each")
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.roles, self.device = roles, device
        if recipe.delayed():
            self._share([recipe.qfactory(None)] * num_quantizers)

    @staticmethod
    def create(recipe: Recipe, **options: Any) -> "RecipeState":
        """RecipeState(recipe, **options)."""
        return RecipeState(recipe, **options)

    def make_quantizers(self) -> list[Any]:
        """One quantizer for each slot. UserError for requests of delayed scaling that differ."""
        slots = range(self.num_quantizers)
        if self.recipe.custom():
            answers = [self.recipe.qfactory(self.roles[slot] if self.roles else None) for slot in slots]
        else:
            answers = [self.recipe.qfactory(self._role(slot)) for slot in slots]
        requests = [answer for answer in answers if isinstance(answer, DelayedScalingRequest)]
        if requests and self.scale is None:
            self._share(requests)
        places = iter(range(len(requests)))
        return [self._delayed(next(places)) if answer in requests else answer for answer in answers]

    @property
    def _has_delayed_scaling(self) -> bool:
        return self.scale is not None

    def _share(self, requests: Sequence[DelayedScalingRequest]) -> None:
        first = requests[0]
        if any(request != first for request in requests):
            raise UserError(f"RecipeState: its requests of delayed scaling differ: {first} and others; give equal ones")
        self._inner_delayed_scaling_recipe = DelayedScaling(**vars(first))
        options = {"dtype": torch.float32, "device": self.device}
        self.scale = torch.ones(len(requests), **options)
        self.amax_history = torch.zeros(first.amax_history_len, len(requests), **options)

    def _delayed(self, place: int) -> Float8Quantizer:
        of_mode = QuantizerRole(tensor_type=SLOTS[self.mode][0])
        dtype = self._inner_delayed_scaling_recipe.fp8_format.dtype(of_mode)
        return Float8Quantizer(self.scale[place], self.amax_history[0, place].reshape(1), dtype)

    def _slot_role(self, idx: int) -> QuantizerRole:
        """The role of a slot as it was given; without one a role without words."""
        role = self.roles[idx] if self.roles else None
        return QuantizerRole() if role is None else role

    def _slot_tensor_type(self, idx: int) -> str:
        """The tensor of a slot: its role's, if a linear has it, or the tensor of its place."""
        named = self._slot_role(idx).tensor_type
        return named if named in TENSORS else SLOTS[self.mode][idx % len(SLOTS[self.mode])]

    def _role(self, idx: int) -> QuantizerRole:
        role, tensor_type = self._slot_role(idx), self._slot_tensor_type(idx)
        return role if role.tensor_type == tensor_type else QuantizerRole(tensor_type=tensor_type)


DelayedScalingRecipeState = Float8CurrentScalingRecipeState = MXFP8BlockScalingRecipeState = RecipeState
Float8BlockScalingRecipeState = NVFP4BlockScalingRecipeState = CustomRecipeState = RecipeState
