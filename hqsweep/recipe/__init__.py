"""Recipes: the format of every tensor of every product, over the whole training.

Names are imported when they are first read: factories, pairs and roles need no torch, the rest does. The package is
also a function: hqsweep.recipe("nvfp4") returns the packaged recipe of that name.
"""

import os
import sys
from types import ModuleType
from typing import Any

__all__ = ["CustomRecipe", "DpaQuantizers", "LinearQuantizers", "QuantizerRole", "Recipe", "find_factory",
           "parse_recipe"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hqsweep.recipe' has no attribute {name!r}")
    from hqsweep.recipe.argument import parse_recipe
    from hqsweep.recipe.custom import CustomRecipe
    from hqsweep.recipe.factories import find_factory
    from hqsweep.recipe.roles import QuantizerRole
    from hqsweep.recipe.sectioned import Recipe
    from hqsweep.recipe.sections import DpaQuantizers, LinearQuantizers

    exports = (CustomRecipe, DpaQuantizers, LinearQuantizers, QuantizerRole, Recipe, find_factory, parse_recipe)
    globals().update(zip(__all__, exports, strict=True))
    return globals()[name]


class _Package(ModuleType):
    def __call__(self, name_or_path: str | os.PathLike[str]) -> Any:
        """Return the recipe of a name ("nvfp4": in ./conf/recipe, else packaged), or of a YAML file's path.

        Every Python function with a recipe argument takes the same texts, and so does recipe= on the command line.
        "format:nvfp4", and text that is no recipe's name ("nvfp4|mxfp8"), is a format for all linears, experts and the
        head.
        A recipe's schedule is in its `schedule`; hqsweep.recipe.stages.stages follows it.

        Raises:
            UserError: the text is none of these, the file is missing, or it contains no recipe.
        """
        from hqsweep.recipe.argument import recipe_of

        return recipe_of(name_or_path)


sys.modules[__name__].__class__ = _Package
