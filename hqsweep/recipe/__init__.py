"""Recipes: which format every tensor of every product takes, and when.

The names are imported when one of them is first read: factories, pairs and roles need no torch, and the rest does.
"""

from typing import Any

__all__ = ["CustomRecipe", "DpaQuantizers", "LinearQuantizers", "QuantizerRole", "Recipe", "find_factory",
           "parse_recipe"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hqsweep.recipe' has no attribute {name!r}")
    from hqsweep.recipe.custom import CustomRecipe
    from hqsweep.recipe.factories import find_factory
    from hqsweep.recipe.roles import QuantizerRole
    from hqsweep.recipe.schedule import parse_recipe
    from hqsweep.recipe.sectioned import Recipe
    from hqsweep.recipe.sections import DpaQuantizers, LinearQuantizers

    exports = (CustomRecipe, DpaQuantizers, LinearQuantizers, QuantizerRole, Recipe, find_factory, parse_recipe)
    globals().update(zip(__all__, exports, strict=True))
    return globals()[name]
