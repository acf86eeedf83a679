"""Overrides of single tensors and directions of a recipe, whose parts a config may spell as one text."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from hqsweep.quant.hybrid import FIELDS, HybridQuantizer
from hqsweep.recipe.roles import HEAD
from hqsweep.recipe.sectioned import SECTIONS
from hqsweep.recipe.sections import HIGH_PRECISION, LinearQuantizers

PARTS = {part: section.tensors() for part, section in (SECTIONS | {HEAD: LinearQuantizers}).items()}
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
        section = _section(recipe, part)
        if section is None or field not in section:
            return
        OmegaConf.update(recipe, part, section)
        if fields and fields[0] in FIELDS:
            _open_quantizer(recipe, f"{part}.{field}")
    elif field in FIELDS:
        if recipe.get(part) is None and part in HIGH_PRECISION:
            OmegaConf.update(recipe, part, str(HIGH_PRECISION[part]))
        _open_quantizer(recipe, part)


def _section(recipe: DictConfig, part: str) -> dict[str, Any] | None:
    """Tensor -> quantizer of a section as the recipe says it, defaults filled in; None where it is no section."""
    default = {}
    if part == "grouped_linear":
        default = _section(recipe, "linear") or {}
    elif part in HIGH_PRECISION:
        default = HIGH_PRECISION[part].texts()
    value = recipe.get(part)
    if value is None:
        return default
    if isinstance(value, DictConfig) and "rowwise" not in value:
        return default | {tensor: each for tensor, each in value.items() if each is not None}
    return dict.fromkeys(PARTS[part], value) if isinstance(value, DictConfig | str) else None


def _open_quantizer(recipe: DictConfig, key: str) -> None:
    value = OmegaConf.select(recipe, key)
    if isinstance(value, str):
        quantizer = HybridQuantizer.parse(value)
        OmegaConf.update(recipe, key, {name: str(getattr(quantizer, name)) for name in FIELDS})
