"""Sections of a composed config, and values that overrides write into them.

A user's own model takes the place of a YAML's GPT. The part of a recipe that an override names one tensor or direction
of is spelled out. Errors of Hydra and OmegaConf become one line each.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hqsweep.config.model import TARGET, HFModelConfig, ModelConfig, UserModel
from hqsweep.config.recipe_text import part_quantizers
from hqsweep.config.safe import check_expansion
from hqsweep.errors import UserError, nearest
from hqsweep.formats.spec import QUANTIZER_FIELDS, directions
from hqsweep.recipe.roles import HEAD, IN_HIGH_PRECISION, TENSOR_TYPES

MODEL_TARGET = f"model.{TARGET}"
"""The function that builds a user's own model; it stands for the whole section, whose other keys are its arguments."""

DATA_TARGET = f"data.{TARGET}"
"""The function that gives samples; it stands for the whole section, whose other keys are its arguments."""


def take_factory(config: DictConfig) -> None:
    """Have a section for a Python function, without the keys of another kind of model."""
    if OmegaConf.select(config, "model.kind") != "factory":
        config["model"] = {"kind": "factory"}


def is_users(config: DictConfig) -> bool:
    """Whether the section is for a user's own model."""
    model = config.get("model")
    return isinstance(model, DictConfig) and bool(model.get("kind"))


def drop_gpt(config: DictConfig) -> None:
    """Drop a YAML's keys of the GPT, if a group for a user's own model was chosen instead."""
    model = config["model"]
    own = (*UserModel.model_fields, *(HFModelConfig.model_fields if model["kind"] == "hf" else ()))
    for key in [key for key in model if key in ModelConfig.model_fields and key not in own]:
        del model[key]


PARTS = {part: TENSOR_TYPES[part] for part in ("linear", "grouped_linear", "dpa")} | {HEAD: TENSOR_TYPES["linear"]}
PARTS |= {"embedding": (), "norm": ()}
"""Part of a recipe -> its tensors; none where the part is one quantizer."""


def open_quantizers(config: DictConfig, key: str) -> None:
    """Spell out the part of a recipe with the field `key`, so that the rest of the part stays unchanged.

    For a key such as recipe.dpa.qkv the section becomes {tensor: quantizer}: as stated in the recipe, or else as the
    section would resolve. For a key such as recipe.dpa.qkv.columnwise the quantizer becomes {rowwise, columnwise,
    columnwise_source} as well. Other keys, and a recipe that is a Python factory, change nothing.
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


def explain(error: Exception) -> str:
    """The reason why a YAML file could not be composed, in one line."""
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
    """The message of Hydra or OmegaConf, without the lines that repeat the key and its type."""
    text = re.split(r"\n\s*(?:full_key|object_type|Config search path|Available options)", str(error))[0]
    cause = f": {one_line(error.__cause__)}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return re.sub(r"\s+", " ", text).strip() + cause
