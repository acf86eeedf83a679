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
