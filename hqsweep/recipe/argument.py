"""What functions take as `recipe=`, and the quantizers that it yields.

A Recipe or CustomRecipe gives a module the quantizers for its name and type. A section (LinearQuantizers,
DpaQuantizers), a quantizer, or a mapping from tensors to quantizers applies to this module alone. A mapping with
`linear` or `qfactory` is the config of a recipe. Composite modules take the same and pass it to all of their linears.
A text means the same in every Python function and for recipe= on the command line:

"nvfp4"                     the recipe of that name in ./conf/recipe, else the packaged one
"mine.yaml", "my/recipe"    the recipe of a YAML file: text that ends in .yaml or .yml or has a separator, or a Path
"format:nvfp4"              the format, or the quantizer ("format:nvfp4|mxfp8"), for every tensor of every product
"nvfp4|mxfp8", "fp8_block"  the same, for a text that is no recipe's name
"nvfp4/mxfp8/bf16"          the formats of fprop, dgrad and wgrad (hqsweep.recipe.gemms), also behind "format:"
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hqsweep.config.recipe_files import FORMAT, PACKAGED, known_names, read_recipe, recipe_file
from hqsweep.errors import UserError, nearest
from hqsweep.formats import Format, parse
from hqsweep.formats.spec import NAMES
from hqsweep.memo import constant_result, memo
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe, Change
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.factories import FindFactory, factory_name
from hqsweep.recipe.gemms import KEY as GEMMS_KEY
from hqsweep.recipe.gemms import is_gemms_text
from hqsweep.recipe.pairs import GEMMS
from hqsweep.recipe.products import check_products
from hqsweep.recipe.roles import module_roles
from hqsweep.recipe.sectioned import KEYS, SECTIONS, Override, Recipe, parse_gemm
from hqsweep.recipe.sections import MODULE_SECTIONS, Faults, LinearQuantizers, Section, parse_quantizer

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
    if isinstance(text, str) and plain.startswith(FORMAT) and "/" not in plain:
        return parse_quantizer(plain.removeprefix(FORMAT), where)
    if isinstance(text, str) and (plain.startswith(FORMAT) or is_gemms_text(plain)):
        section = LinearQuantizers.parse({GEMMS_KEY: plain.removeprefix(FORMAT)}, where)
        return Recipe(linear=section, head=section)
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


CUSTOM_KEYS = ("name", "qfactory", "fp8_dpa", "gemm")
CHANGE_KEYS = ("at", *GEMMS, *(key for key in KEYS if key != "name"), "qfactory", "fp8_dpa")


def parse_recipe(config: Mapping[str, Any], find: FindFactory = factory_name) -> AnyRecipe:
    """Return the recipe of a `recipe` config: sections, or qfactory (also spelled _target_), and the schedule.

    Keys with the value None count as left out. find: returns the function of a qfactory. The default, factory_name,
    imports nothing, since a config may be untrusted; such a recipe refuses to quantize. find_factory imports the
    function's module.

    UserError with the key path of every fault.
    """
    fields = {key: value for key, value in config.items() if value is not None}
    entries = fields.pop("schedule", [])
    recipe = before = _parse_one(fields, "recipe", find)
    if not isinstance(entries, list | tuple):
        raise UserError(
            f"recipe.schedule is {entries!r}; it takes a list of changes such as [{{at: 0.82, fprop: bf16}}]"
        )
    faults, changes = Faults(), []
    for index, entry in enumerate(entries):
        change = faults.take(_parse_change, entry, before, f"recipe.schedule[{index}]", find)
        if change is not None:
            changes.append(change)
            before = change.recipe
    faults.raise_any()
    return replace(recipe, schedule=tuple(changes))


def recipe_config(recipe: AnyRecipe) -> dict[str, Any]:
    """Return the canonical text of a recipe and its schedule, with every change in full. parse_recipe() reads it."""
    changes = [{"at": change.at} | change.recipe.to_config() for change in recipe.schedule]
    return recipe.to_config() | {"schedule": changes}


def _parse_one(config: Mapping[str, Any], where: str, find: FindFactory) -> AnyRecipe:
    if not config.keys() & {"qfactory", "_target_"}:
        return Recipe.from_config(config, where)
    config = {("qfactory" if key == "_target_" else key): value for key, value in config.items()}
    unknown = [key for key in config if key not in CUSTOM_KEYS]
    if unknown:
        raise UserError(
            f"{where}: unknown key '{unknown[0]}' beside qfactory{nearest(unknown[0], CUSTOM_KEYS)}; it takes"
            f" {', '.join(CUSTOM_KEYS)} and schedule, the rest is what the factory says"
        )
    fp8_dpa = config.get("fp8_dpa", False)
    if not isinstance(fp8_dpa, bool):
        raise UserError(f"{where}.fp8_dpa: got {fp8_dpa!r}; it must be true or false")
    factory = find(str(config["qfactory"]), f"{where}.qfactory")
    return CustomRecipe(qfactory=factory, fp8_dpa=fp8_dpa, gemm=parse_gemm(config.get("gemm", "exact"), where))


def _parse_change(entry: object, before: AnyRecipe, where: str, find: FindFactory) -> Change:
    fields = {k: v for k, v in entry.items() if v is not None} if isinstance(entry, Mapping) else {}
    fields = {("qfactory" if key == "_target_" else key): value for key, value in fields.items()}
    unknown = [key for key in fields if key not in CHANGE_KEYS]
    if unknown or len(fields) < 2 or "at" not in fields:
        hint = nearest(unknown[0], CHANGE_KEYS) if unknown else ""
        raise UserError(f"{where} is {entry!r}; it takes at, and at least one of {', '.join(CHANGE_KEYS[1:])}{hint}")
    at = fields.pop("at")
    fraction = isinstance(at, float) and 0 < at < 1
    if not (fraction or (type(at) is int and at >= 1)):
        raise UserError(
            f"{where}.at: got {at!r}; it takes a number of updates (1 or more), or a fraction between 0 and 1"
        )
    return Change(at=at, recipe=_changed(fields, before, where, find))


def _changed(fields: dict[str, Any], before: AnyRecipe, where: str, find: FindFactory) -> AnyRecipe:
    gemms = {key: fields.pop(key) for key in GEMMS if key in fields}
    if "qfactory" in fields or isinstance(before, CustomRecipe):
        if gemms or ("qfactory" not in fields and "linear" not in fields):
            raise UserError(f"{where}: {', '.join(gemms) or 'a part of a recipe'} cannot change a Python qfactory; give"
                            " another qfactory, or a linear section and what else the recipe has")  # fmt: skip
        inherited = {"gemm": before.gemm} | (
            {"fp8_dpa": getattr(before, "fp8_dpa", False)} if "qfactory" in fields else {}
        )
        return _parse_one(inherited | fields, where, find)
    if isinstance(fields.get("linear"), Mapping) and not {"rowwise", GEMMS_KEY} & fields["linear"].keys():
        fields["linear"] = before.linear.texts() | dict(fields["linear"])
    inherited = before.to_config()
    if "linear" in fields and before.grouped_linear == before.linear:
        inherited.pop("grouped_linear", None)  # follows linear, as it did
    recipe = Recipe.from_config(inherited | fields, where)
    faults = Faults()
    formats = {gemm: faults.take(_parse_format, text, f"{where}.{gemm}") for gemm, text in gemms.items()}
    faults.raise_any()
    return _with_gemms(recipe, formats)


def _parse_format(text: object, where: str) -> Format:
    try:
        return parse(str(text))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _with_gemms(recipe: Recipe, formats: Mapping[str, Format]) -> Recipe:
    """Return the recipe with these formats for both operands of the GEMMs, in all linears, the head and overrides."""

    def of(section: LinearQuantizers | None) -> LinearQuantizers | None:
        for gemm, format in formats.items():
            for tensor, direction in GEMMS[gemm] if section else ():
                section = replace(section, **{tensor: replace(getattr(section, tensor), **{direction: format})})
        return section

    def override(o: Override) -> Override:
        return replace(o, linear=of(o.linear), grouped_linear=of(o.grouped_linear))

    sections = {key: of(getattr(recipe, key)) for key in (*(k for k in SECTIONS if k != "dpa"), "head")}
    return replace(recipe, **sections, overrides=tuple(map(override, recipe.overrides)))
