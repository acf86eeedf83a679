"""The section `recipe` of the config: its text in canonical form, and the recipe that was parsed from it."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, ValidationInfo, model_validator

from hqsweep.config.keys import RecipeKeys
from hqsweep.errors import UserError
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.factories import factory_name
from hqsweep.recipe.schedule import parse_recipe, recipe_config


class RecipeConfig(RecipeKeys):
    """A recipe in canonical text form; whatever parse_recipe takes is accepted.

    Either qfactory and fp8_dpa are given or the sections from linear to overrides; the others are None.
    """

    _recipe: AnyRecipe = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _canonical(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        if not isinstance(value, Mapping):
            raise UserError(f"recipe: got {value!r}; it takes a mapping, or the name of a recipe as recipe=NAME")
        recipe = parse_recipe(value, (info.context or {}).get("find", factory_name))
        section = handler({"name": value.get("name")} | recipe_config(recipe))
        section._recipe = recipe
        return section

    def build(self) -> AnyRecipe:
        """The recipe itself, its schedule included, as it was parsed with the config."""
        return self._recipe

    @property
    def has_names(self) -> bool:
        """Whether a Python factory of it is a name alone, so that nobody can say what its quantizers are."""
        stages = (self._recipe, *(change.recipe for change in self._recipe.schedule))
        return any(isinstance(stage, CustomRecipe) and stage.is_name for stage in stages)
