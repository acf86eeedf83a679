"""The argument `recipe=` of modules, and the quantizers that it yields.

A Recipe or CustomRecipe gives a module the quantizers for its name and type. So does a recipe's name or path
(hqsweep.recipe.named). A section (LinearQuantizers, DpaQuantizers), a quantizer, its text ("format:nvfp4",
"nvfp4|mxfp8@rowwise_dequantized"), or a mapping from tensors to quantizers applies to this module alone. A mapping with
`linear` or `qfactory` is the config of a recipe. Composite modules take the same and pass it to all of their linears.
"""

import os
from collections.abc import Mapping
from typing import Any

from hqsweep.errors import UserError
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.named import first_stage
from hqsweep.recipe.roles import module_roles
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.recipe.sectioned import Recipe
from hqsweep.recipe.sections import MODULE_SECTIONS, LinearQuantizers, Section
from hqsweep.recipe.validate import check_products

RecipeArgument = AnyRecipe | Section | HybridQuantizer | str | os.PathLike | Mapping[str, Any]
RECIPE_KEYS = ("linear", "qfactory", "_target_")
"""A recipe's config has one of these keys; a section has none."""


def recipe_or_section(recipe: RecipeArgument, module_type: str, name: str) -> AnyRecipe | Section:
    """Return a recipe (an object, a name, or a config), or else the module's section.

    UserError, with the module's name, for any other argument.
    """
    if isinstance(recipe, str | os.PathLike):
        recipe = first_stage(recipe, name)
    if isinstance(recipe, Recipe | CustomRecipe):
        return recipe
    if isinstance(recipe, Mapping) and any(key in recipe for key in RECIPE_KEYS):
        return parse_recipe(recipe)
    section = MODULE_SECTIONS[module_type]
    if isinstance(recipe, section):
        return recipe
    if recipe is None or isinstance(recipe, Section):
        got = "None" if recipe is None else f"a {type(recipe).__name__}"
        raise UserError(
            f"{name}: recipe is {got}; a {module_type} takes a Recipe or CustomRecipe, {section.__name__}, the name of"
            " a recipe, a format, or the mapping of one"
        )
    return section.parse(recipe, name)


def module_quantizers(recipe: RecipeArgument, module_type: str, name: str) -> tuple[Section, str]:
    """Return the quantizers of a module, and its GEMM mode. Raises as recipe.resolve() and check_products() do."""
    section, gemm = recipe_or_section(recipe, module_type, name), "exact"
    if not isinstance(section, Section):
        recipe, roles = section, module_roles(module_type, name)
        resolved, gemm = recipe.resolve(roles), recipe.gemm
        section = MODULE_SECTIONS[module_type](**{role.tensor_type: resolved[role] for role in roles})
    check_products([(module_type, name, section)], gemm)
    return section, gemm


def whole_recipe(recipe: RecipeArgument, name: str) -> AnyRecipe:
    """Return the recipe of a composite module. A section becomes the section of all of its linears."""
    chosen = recipe_or_section(recipe, "linear", name)
    if not isinstance(chosen, LinearQuantizers):
        return chosen
    if chosen.output or chosen.grad_input:
        raise UserError(
            f"{name}: recipe has quantizers for output or grad_input, which are of single modules; leave them out"
        )
    return Recipe(linear=chosen, head=chosen)
