"""What functions take as `recipe=`, and the quantizers that it yields.

A Recipe or CustomRecipe gives a module the quantizers for its name and type. A section (LinearQuantizers,
DpaQuantizers), a quantizer, or a mapping from tensors to quantizers applies to this module alone. A mapping with
`linear` or `qfactory` is the config of a recipe. Composite modules take the same and pass it to all of their linears.
A text means the same in every Python function and for recipe= on the command line:

"nvfp4"                     the recipe of that name in ./conf/recipe, else the packaged one
"mine.yaml", "my/recipe"    the recipe of a YAML file: text that ends in .yaml or .yml or has a separator, or a Path
"format:nvfp4"              the format, or the quantizer ("format:nvfp4|mxfp8"), for every tensor of every product
"nvfp4|mxfp8", "fp8_block"  the same, for a text that is no recipe's name
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hqsweep.config.recipe_files import FORMAT, PACKAGED, known_names, read_recipe, recipe_file
from hqsweep.errors import UserError, nearest
from hqsweep.formats.spec import NAMES
from hqsweep.memo import constant_result, memo
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.roles import module_roles
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.recipe.sectioned import Recipe
from hqsweep.recipe.sections import MODULE_SECTIONS, LinearQuantizers, Section, parse_quantizer
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


def recipe_of(text: str | os.PathLike[str], where: str = "hqsweep.recipe") -> AnyRecipe:
    """Return the recipe of a name or a path. A quantizer's text yields a recipe for all linears, experts and the head.

    where: starts the error. UserError for any other text, a missing file, and a file without a recipe.
    """
    meant = meaning(text, where)
    if not isinstance(meant, HybridQuantizer):
        return meant
    section = LinearQuantizers(input=meant, weight=meant, grad_output=meant)
    return Recipe(linear=section, head=section)


@constant_result
def first_stage(text: str | os.PathLike[str], where: str) -> AnyRecipe | HybridQuantizer:
    """Return meaning(), and warn if the recipe has a schedule, which the caller does not follow."""
    meant = meaning(text, where)
    changes = () if isinstance(meant, HybridQuantizer) else meant.schedule
    if changes:
        when = ", ".join(change.when for change in changes)
        warnings.warn(
            f"{where}: recipe '{os.fspath(text)}' has a schedule ({when}), which is not followed here: this is what"
            " comes before it; hqsweep.recipe.stages.stages(recipe, steps) gives each step's, for set_recipe",
            stacklevel=2,
        )
    return meant


def meaning(text: str | os.PathLike[str], where: str) -> AnyRecipe | HybridQuantizer:
    """Return the recipe of a name or a path, or the quantizer of any other text. Raises as recipe_of() does."""
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"{where}: got {text!r}; it takes the name of a recipe, the path of a YAML file, or a format")
    plain = os.fsdecode(text).strip()
    if isinstance(text, str) and plain.startswith(FORMAT):
        return parse_quantizer(plain.removeprefix(FORMAT), where)
    if not isinstance(text, str) or plain.endswith((".yaml", ".yml")) or any(s in plain for s in {"/", os.sep}):
        return _read(Path(plain), where)
    path = recipe_file(plain)
    if path is not None:
        return _packaged(plain) if path.is_relative_to(PACKAGED) else _read(path, where)
    if plain not in NAMES and plain.replace("_", "").isalnum():
        raise UserError(
            f"{where}: '{plain}' is no recipe and no format{nearest(plain, [*known_names(), *NAMES])}; `hqsweep recipe"
            f" ls` lists the recipes, formats are {', '.join(NAMES)}, and a file has its path, such as 'mine.yaml'"
        )
    return parse_quantizer(plain, where)


@memo
def _packaged(name: str) -> AnyRecipe:
    return parse_recipe(read_recipe(recipe_file(name)))


def _read(path: Path, where: str) -> AnyRecipe:
    try:
        return parse_recipe(read_recipe(path))
    except UserError as error:
        raise UserError(f"{where}: recipe '{path}': {error}") from None
