"""Values of overrides in composed configs, and what Hydra and OmegaConf say about them in one line each."""

import re
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hqsweep.config.references import check_expansion
from hqsweep.errors import UserError, nearest
from hqsweep.quant.hybrid import FIELDS, HybridQuantizer
from hqsweep.recipe.roles import HEAD
from hqsweep.recipe.sectioned import SECTIONS
from hqsweep.recipe.sections import HIGH_PRECISION, LinearQuantizers

PARTS = {part: section.tensors() for part, section in (SECTIONS | {HEAD: LinearQuantizers}).items()}
PARTS |= {"embedding": (), "norm": ()}
"""Part of a recipe -> its tensors; none where the part is one quantizer."""


def set_number(config: dict[str, Any], key: str, value: int) -> bool:
    """Write into plain containers where a number or nothing stands now; False for all else."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config.get(parent) if isinstance(config, dict) else None
    if not isinstance(config, dict) or last not in config or isinstance(config[last], dict | list | str | bool):
        return False
    config[last] = value
    return True


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain containers with references replaced; errors name the key."""
    try:
        check_expansion(OmegaConf.to_container(config), "the config")
        missing = sorted(OmegaConf.missing_keys(config))
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {one_line(error)}; correct it, or write the value itself") from None
    if missing:
        raise UserError(f"{', '.join(missing)}: no value yet (???); give {missing[0]}=VALUE")
    return plain


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


def explain(error: Exception) -> str:
    """Why a YAML file could not be composed."""
    if isinstance(error, MissingConfigException):
        names = [Path(option).name for option in error.options or ()]
        return f"no config '{error.missing_cfg_file}'{nearest(Path(error.missing_cfg_file or '').name, names)}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name} line {error.problem_mark.line + 1}: {error.problem}; correct the YAML"
    unused = re.match(r"Could not override '(.*?)'", str(error))
    if unused:
        return f"its defaults list has no {unused[1]} to replace; leave it out, or add one by +{unused[1]}=NAME"
    twice = re.match(r"Multiple values for (\w+)", str(error))
    if twice:
        return f"{twice[1]} is chosen in its defaults list already; write {twice[1]}=NAME without a +"
    return one_line(error)


def one_line(error: BaseException) -> str:
    """What Hydra or OmegaConf says, without the lines that repeat the key and its type."""
    text = re.split(r"\n\s*(?:full_key|object_type|Config search path|Available options)", str(error))[0]
    cause = f": {one_line(error.__cause__)}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return re.sub(r"\s+", " ", text).strip() + cause
