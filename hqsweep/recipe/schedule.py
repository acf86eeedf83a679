"""The recipe of a `recipe` config, with its schedule.

    schedule:
      - {at: 1000, linear: mxfp8}     # after 1000 updates; any section of a recipe
      - {at: 0.82, fprop: bf16}       # for the last 18 % of the updates; both operands of fprop, dgrad or wgrad
      - {at: 0.95, qfactory: my.module.factory}

Each change starts from the recipe before it, so it lists only differences.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hqsweep.errors import UserError, nearest
from hqsweep.formats import Format, parse
from hqsweep.recipe.base import AnyRecipe, Change
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.factories import FindFactory, factory_name
from hqsweep.recipe.pairs import GEMMS
from hqsweep.recipe.sectioned import KEYS, SECTIONS, Override, Recipe, parse_gemm
from hqsweep.recipe.sections import Faults, LinearQuantizers

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
    if isinstance(fields.get("linear"), Mapping) and "rowwise" not in fields["linear"]:
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
