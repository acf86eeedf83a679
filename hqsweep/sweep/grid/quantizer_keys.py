"""Overrides of single tensors and directions of a recipe, whose parts a config may spell as one text; without torch."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from hqsweep.config.recipe_text import part_quantizers
from hqsweep.formats.spec import QUANTIZER_FIELDS, directions
from hqsweep.recipe.roles import HEAD, IN_HIGH_PRECISION, TENSOR_TYPES

PARTS = {part: TENSOR_TYPES[part] for part in ("linear", "grouped_linear", "dpa")} | {HEAD: TENSOR_TYPES["linear"]}
PARTS |= {"embedding": (), "norm": ()}
"""Part of a recipe -> its tensors; none where the part is one quantizer."""


def open_quantizers(config: DictConfig, key: str) -> None:
    """Spell out the part of a recipe that `key` is a field of, so that the rest of the part stays as it was.

    For a key such as recipe.dpa.qkv the section becomes {tensor: quantizer}: of what the recipe says, or else of what
    the section would resolve to. For one such as recipe.dpa.qkv.columnwise the quantizer becomes {rowwise, columnwise,
    columnwise_source} as well. A key of anything else, or of a recipe that is a Python factory, changes nothing.
    """
    top, *path = key.split(".")
    recipe = OmegaConf.select(config, "recipe") if top == "recipe" else None
    if len(path) < 2 or path[0] not in PARTS or not isinstance(recipe, DictConfig) or recipe.get("qfactory"):
        return
    part, field, *fields = path
    if field in PARTS[part]:
        section: dict[str, Any] = part_quantizers(recipe, part)
        if field not in section:
            return
        OmegaConf.update(recipe, part, section)
        if fields and fields[0] in QUANTIZER_FIELDS:
            _open_quantizer(recipe, f"{part}.{field}")
    elif field in QUANTIZER_FIELDS:
        if recipe.get(part) is None and part in IN_HIGH_PRECISION:
            OmegaConf.update(recipe, part, IN_HIGH_PRECISION[part])
        _open_quantizer(recipe, part)


def _open_quantizer(recipe: DictConfig, key: str) -> None:
    value = OmegaConf.select(recipe, key)
    if isinstance(value, str):
        OmegaConf.update(recipe, key, dict(zip(QUANTIZER_FIELDS, directions(value), strict=True)))
