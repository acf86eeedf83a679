"""Overrides of the command line and of sweeps: Hydra's grammar, the allowed part of it, and the sections they change.

A user's own model takes the place of a YAML's GPT. The part of a recipe that an override names one tensor or direction
of is spelled out. Errors of Hydra and OmegaConf become one line each.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hqsweep.config.keys import part_quantizers
from hqsweep.config.model import TARGET, HFModelConfig, ModelConfig, UserModel
from hqsweep.config.recipe_files import FORMAT, FORMAT_TEXTS
from hqsweep.config.safe import check_expansion, check_references
from hqsweep.config.study import StudyConfig
from hqsweep.errors import UserError, nearest
from hqsweep.formats.spec import PROJECT_FIELD, QUANTIZER_FIELDS, directions, split_projection
from hqsweep.recipe.gemms import KEY as GEMMS_KEY
from hqsweep.recipe.roles import HEAD, IN_HIGH_PRECISION, TENSOR_TYPES
from hqsweep.sweep.grid.arms import check_size
from hqsweep.sweep.store.names import NOT_IN_ID

STUDY_KEYS = tuple(StudyConfig.model_fields)
PLAIN = ("command", "log")
"""Keys whose values are words of a program, with braces and spaces, as they are typed."""
POINTS = "fork.at"
"""The one key of a study with several values, written like values of a swept key or as a list."""
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_$][\w./@:$-]*")


def quoted(text: str) -> str:
    """The text as a value of an override: in quotes, with backslashes doubled where Hydra would read them as
    escapes."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


def is_text(override: Override) -> bool:
    """Whether it is recipe=PATH.yaml or recipe=format:QUANTIZER, instead of a name of the group."""
    return override.key_or_group == "recipe" and _is_text(str(override.value()))


def _is_text(value: str) -> bool:
    return value.endswith((".yaml", ".yml")) or value.startswith(FORMAT)


def options(loader: ConfigLoaderImpl, group: str) -> list[str]:
    """Names that a config group offers; "" is the group of whole configs. Hydra's own start with an underscore."""
    return [name for name in loader.get_group_options(group) if not name.startswith("_")]


class Overrides:
    """Reads override texts, given the config groups of a loader."""

    def __init__(self, loader: ConfigLoaderImpl) -> None:
        self.loader = loader
        self.parser = OverridesParser.create(config_loader=loader)
        self.groups = set(loader.list_groups(""))

    def parse_checked(self, texts: Sequence[str]) -> list[Override]:
        """Texts that have been checked, such as choices() gives them."""
        return self.parser.parse_overrides(list(texts))

    def parse(self, texts: Sequence[str]) -> dict[str, Override]:
        """Overrides of one origin by key, each text named in its errors; a key may come once."""
        parsed: dict[str, Override] = {}
        for text in texts:
            override = self._parse_one(text)
            if override.key_or_group in parsed:
                raise UserError(f"override '{text}': {override.key_or_group} is given twice; give it once")
            parsed[override.key_or_group] = override
            self._check(override)
        return parsed

    def _parse_one(self, text: str) -> Override:
        key, equals, _ = text.partition("=")
        if key.startswith(("~", "hydra.", "hydra/")):
            raise UserError(f"override '{text}': keys are not deleted here, nor Hydra's own set; write KEY=VALUE")
        if not equals or not _KEY.fullmatch(key):
            raise UserError(f"override '{text}': not of the form KEY=VALUE; write for example train.steps=100")
        check_references(text, f"override of {key}")
        if key in PLAIN and not text.partition("=")[2].startswith(("'", '"')):
            text = f"{key}={quoted(text.partition('=')[2])}"
        try:
            parsed = self.parser.parse_overrides([text])[0]
            if key == POINTS and parsed.is_discrete_sweep():
                values = [choice.partition("=")[2] for choice in self.choices(parsed)]
                parsed = self.parser.parse_overrides([f"{key}=[{','.join(values)}]"])[0]
            return parsed
        except HydraException:
            raise UserError(
                f"override '{text}': the value cannot be read; write KEY=VALUE, KEY=V1,V2, KEY=range(1,4) or"
                f" KEY=choice(a,b), and quote a value with special characters, as in {key}=\"'VALUE'\""
            ) from None

    def _check(self, override: Override) -> None:
        key, text = override.key_or_group, f"override '{override.input_line}'"
        if override.package is not None:
            raise UserError(f"{text}: '@' would move a config group elsewhere, where nothing reads it; leave it out")
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(f"{text}: an interval cannot be expanded; write range(START,STOP,STEP) or V1,V2")
        if override.is_sweep_override() and key.split(".")[0] in (*NOT_IN_ID, *STUDY_KEYS):
            raise UserError(f"{text}: {key} cannot be swept, it belongs to the whole sweep; give it one value")
        if not self.is_group(override) and not self.choices(override):
            raise UserError(f"{text}: it holds no value, so no run; write V1,V2 or range(START,STOP)")
        if self.is_group(override):
            known, values = options(self.loader, key), [choice.partition("=")[2] for choice in self.choices(override)]
            if key == "recipe":
                values = [str(choice.value()) for choice in self.parse_checked(self.choices(override))]
                known += FORMAT_TEXTS
            if not values:
                raise UserError(f"{text}: no {key} matches; known are {', '.join(known)}")
            named = [value for value in values if not (key == "recipe" and _is_text(value))]
            wrong = next((value for value in named if value not in known), None)
            if wrong is not None:
                hint = nearest(wrong, known) or f"; known are {', '.join(known)}"
                raise UserError(f"{text}: no {key} '{wrong}'{hint}")

    def is_group(self, override: Override) -> bool:
        return override.key_or_group in self.groups and not is_text(override)

    def choices(self, override: Override) -> list[str]:
        """The override once per value."""
        if not override.is_sweep_override():
            return [f"{override.get_key_element()}={override.get_value_element_as_str()}"]
        try:
            check_size(_count(override), f"override '{override.input_line}'")
            return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        except UserError:
            raise
        except (ValueError, ZeroDivisionError, OverflowError) as error:
            raise UserError(f"override '{override.input_line}': {error}; write range(START,STOP,STEP)") from None


def _count(override: Override) -> int:
    """The number of values of a swept range, without making them; 0 for values that are written one by one."""
    value = override.value()
    if not isinstance(value, RangeSweep):
        return 0
    return math.ceil(((value.stop or 0) - (value.start or 0)) / value.step)


MODEL_TARGET = f"model.{TARGET}"
"""The function that builds a user's own model; it stands for the whole section, whose other keys are its arguments."""
DATA_TARGET = f"data.{TARGET}"
"""The function that gives samples; it stands for the whole section, whose other keys are its arguments."""

OPTIMIZER_KEYS = "train.optimizer."
"""The beginning of the keys of an optimizer class, whose section stands in place of a name."""


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
OPENED = (*QUANTIZER_FIELDS, PROJECT_FIELD)
"""The keys of a quantizer that is spelled out."""


def open_quantizers(config: DictConfig, key: str) -> None:
    """Spell out the part of a recipe with the field `key`, so that the rest of the part stays unchanged.

    For a key such as recipe.dpa.qkv the section becomes {tensor: quantizer}: as stated in the recipe, or else as the
    section would resolve. For a key such as recipe.dpa.qkv.columnwise the quantizer becomes {rowwise, columnwise,
    columnwise_source} as well, with project where it has one or the key asks for it. For recipe.linear.gemms, which
    says all of a section, it becomes empty. Other keys, and a recipe that is a Python factory, change nothing.
    """
    top, *path = key.split(".")
    recipe = OmegaConf.select(config, "recipe") if top == "recipe" else None
    if len(path) < 2 or path[0] not in PARTS or not isinstance(recipe, DictConfig) or recipe.get("qfactory"):
        return
    part, field, *fields = path
    if field == GEMMS_KEY and PARTS[part] == TENSOR_TYPES["linear"]:
        recipe[part] = {}
    elif field in PARTS[part]:
        section: dict[str, Any] = part_quantizers(recipe, part)
        if field not in section:
            return
        recipe[part] = section
        if fields and fields[0] in OPENED:
            _open_quantizer(recipe, f"{part}.{field}", fields[0])
    elif field in OPENED:
        if recipe.get(part) is None and part in IN_HIGH_PRECISION:
            OmegaConf.update(recipe, part, IN_HIGH_PRECISION[part])
        _open_quantizer(recipe, part, field)


def check_gemms(overrides: Sequence[Override]) -> None:
    """Raise UserError for a section that is given by its products and, beside them, by its tensors."""
    texts = {override.key_or_group: override.input_line for override in overrides}
    for key, text in texts.items():
        part = key.removesuffix(f".{GEMMS_KEY}")
        other = next((own for own in texts if own == part or (own.startswith(f"{part}.") and own != key)), None)
        if key != part and part.startswith("recipe.") and other:
            raise UserError(
                f"override '{text}': {GEMMS_KEY} says all of {part}, and '{texts[other]}' a part of it; leave one out"
            )


def _open_quantizer(recipe: DictConfig, key: str, field: str) -> None:
    value = OmegaConf.select(recipe, key)
    if isinstance(value, str):
        grid, host = split_projection(value)
        opened = dict(zip(QUANTIZER_FIELDS, directions(host), strict=True))
        OmegaConf.update(recipe, key, opened | ({PROJECT_FIELD: grid} if grid or field == PROJECT_FIELD else {}))


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
