"""The composition of `conf=NAME` and overrides into the runs of a grid, as plain dicts: Hydra's, without its launcher.

The override grammar is Hydra's (`a=1,2`, range(), choice(), glob(), config groups), and so is `hydra.sweeper.params` in
a sweep's YAML. Two things differ. Keys are not checked here: an override may name any key, and the typed config, which
knows all of them, refuses the unknown ones. And a grid is composed once per distinct choice of groups, and values are
set afterwards, because a full composition takes 40 ms. Packaged configs are composed once a process.

Hydra's loader is used directly, though its modules are private. The public compose() works through one state of the
whole process: two threads cannot compose at once. It takes twice as long, and no file is checked before it is read.
"""

import copy
import functools
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hqsweep.config.jobs import COMMAND, COMPARED
from hqsweep.config.keys import check_texts
from hqsweep.config.recipe_files import FORMAT, FORMAT_TEXTS, PACKAGED, read_recipe
from hqsweep.config.safe import check_expansion, check_file
from hqsweep.config.study import parse_study
from hqsweep.errors import UserError, nearest
from hqsweep.recipe.gemms import KEY as GEMMS_KEY
from hqsweep.recipe.gemms import is_gemms_text
from hqsweep.sweep.grid.arms import (
    FACTORY_KEYS,
    Difference,
    Grid,
    GridPoint,
    check_arm,
    check_size,
    difference,
    labels,
    override_texts,
)
from hqsweep.sweep.grid.overrides import (
    DATA_TARGET,
    MODEL_TARGET,
    STUDY_KEYS,
    Overrides,
    check_gemms,
    drop_gpt,
    explain,
    is_text,
    is_users,
    one_line,
    open_quantizers,
    options,
    resolved,
    set_number,
    take_factory,
)
from hqsweep.sweep.grid.study import name_recipe, with_study
from hqsweep.sweep.store.names import NOT_IN_ID

ARMS, FACTORIAL = "arms", "factorial"
Stamps = tuple[tuple[str, int, int], ...]
"""Path, time of the last change in ns, and size in bytes of each packaged config."""
_NUMBER = re.compile(r"-?(0|[1-9]\d*)")


def expand(conf: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> Grid:
    """The grid of a sweep, in the order in which the swept keys are given, the last one varying fastest.

    conf: a packaged name, a name in config_dir or ./conf (which come first), or the path of a YAML file.
    overrides: Hydra overrides; they win over what the YAML sweeps under the same key.

    Raises:
        UserError: anything that is wrong with conf, its YAML or an override, except unknown keys and bad values.
    """
    path = Path(conf)
    if not (conf.endswith((".yaml", ".yml")) or "/" in conf):
        return Composer(conf, [config_dir, Path("conf")]).grid(overrides)
    if path.suffix != ".yaml":
        raise UserError(f"conf={conf}: a path must end in .yaml; rename the file, or give a name without folders")
    if not path.is_file():
        raise UserError(f"conf={conf}: no such file{nearest(path.name, _yaml_names(path.parent))}")
    return Composer(path.stem, [path.parent, config_dir, Path("conf")]).grid(overrides)


def known_confs(config_dir: Path | None = None) -> list[str]:
    """The names that conf= takes."""
    return options(_loader(_there([config_dir, Path("conf")])), "")


def known_recipes(config_dir: Path | None = None) -> list[str]:
    """The names that recipe= takes."""
    return options(_loader(_there([config_dir, Path("conf")])), "recipe")


def recipe_composer(config_dir: Path | None = None) -> "Composer":
    """The composer of recipes by their names. To make one takes longer than a recipe does."""
    return Composer("convergence", [config_dir, Path("conf")])


def load_recipe(name: str, config_dir: Path | None = None, composer: "Composer | None" = None) -> Any:
    """The `recipe` config of a name (packaged, in config_dir or in ./conf), of "format:QUANTIZER", or of a YAML file: a
    recipe, or a config that has one. Its fields are unchecked.

    "format:F/D/W" stands for the formats of the products (hqsweep.recipe.gemms), also without "format:".

    composer: recipe_composer(config_dir), for a caller that loads several of known_recipes(config_dir).

    Raises:
        UserError: there is no such recipe, its YAML cannot be composed, or gives no mapping.
    """
    if name.startswith(FORMAT) or is_gemms_text(name):
        text = name.removeprefix(FORMAT)
        section = {GEMMS_KEY: text} if "/" in text else text
        check_texts("recipe.linear", section)
        return {"name": re.sub(r"[^A-Za-z0-9._+-]+", "-", name), "linear": section, "head": section}
    config = composer.compose([f"recipe={name}"]).get("recipe") if composer else _recipe_config(name, config_dir)
    if not isinstance(config, dict):
        raise UserError(
            f"recipe '{name}': its YAML gives no mapping as recipe; write name and linear at the top, without"
            " '@package'"
        )
    return config


def _recipe_config(name: str, config_dir: Path | None) -> Any:
    path = Path(name)
    if path.suffix == ".yml" and path.is_file():  # which Hydra does not read
        return read_recipe(path)
    if path.suffix not in (".yaml", ".yml") and "/" not in name:
        known = known_recipes(config_dir)
        if name not in known:
            hint = nearest(name, [*known, *FORMAT_TEXTS])
            raise UserError(f"recipe '{name}': no such recipe{hint}; known are {', '.join(known)}, or give PATH.yaml")
        return recipe_composer(config_dir).compose([f"recipe={name}"]).get("recipe")
    if path.suffix != ".yaml" or not path.is_file():
        raise UserError(f"recipe '{name}': no such .yaml file{nearest(path.name, _yaml_names(path.parent))}")
    if path.resolve().parent.name == "recipe":  # a member of the group, which may build on others
        return Composer("convergence", [path.resolve().parents[1]]).compose([f"recipe={path.stem}"]).get("recipe")
    config = Composer(path.stem, [path.parent, config_dir, Path("conf")]).compose([])
    return config.get("recipe", config)


def factory_folders(conf: str, overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Return the folders in which modules of Python factories are searched, beside the installed packages.

    They are folders of the user's own configs: of recipe=PATH.yaml and conf=PATH.yaml, then config_dir, then ./conf.
    """
    recipes = [value for text in overrides if text.startswith("recipe=") for value in text[7:].split(",")]
    files = [Path(name) for name in (*recipes, conf) if name.endswith(".yaml")]
    own = [file.parent.parent if file.resolve().parent.name == "recipe" else file.parent for file in files]
    folders = [
        folder.resolve() for folder in (*own, config_dir, Path("conf")) if folder is not None and folder.is_dir()
    ]
    return list(dict.fromkeys(map(str, folders)))


class CheckedSource(FileConfigSource):
    """A folder of configs. Each config is within the bounds of parse_yaml, stands in the folder, and names no further
    places to search, some of which Hydra would import."""

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._normalize_file_name(config_path)
        file = Path(self.path, name)
        if os.path.normpath(name).startswith((os.pardir, os.sep)):
            raise UserError(f"{config_path}: its file is outside of {self.path}; a defaults list stays in its folder")
        if file.is_file():
            check_file(file)
        result = super().load_config(config_path)
        if OmegaConf.is_dict(result.config) and OmegaConf.select(result.config, "hydra.searchpath") is not None:
            raise UserError(f"{file}: hydra.searchpath is not followed; give a folder of configs by --config-dir")
        return result


class ReadOnce(CachingConfigRepository):
    """A repository that reads each file once. A loader copies its own for each of its configs, and reads all files for
    each again: a third of the time of a grid."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReadOnce":
        return self


def check_sources(loader: ConfigLoaderImpl) -> ConfigLoaderImpl:
    """The loader, with a CheckedSource for each folder of the user, and each file read once."""
    repository = loader.repository
    repository.sources = [
        CheckedSource(source.provider, source.path) if source.provider == "user" else source
        for source in repository.sources
    ]
    loader.repository = ReadOnce(repository)
    return loader


def _there(folders: Sequence[Path | None]) -> tuple[Path, ...]:
    """The folders that are there, resolved."""
    return tuple(folder.resolve() for folder in folders if folder is not None and folder.is_dir())


def _loader(folders: Sequence[Path]) -> ConfigLoaderImpl:
    """Hydra's reader of folders and then the packaged configs."""
    hydra.version.setbase("1.3")
    Plugins.instance()  # registers the reader of file://
    search = ConfigSearchPathImpl()
    for folder in folders:
        search.append("user", f"file://{folder}")
    search.append("main", f"file://{PACKAGED}")
    search.append("hydra", "pkg://hydra.conf")
    search.append("schema", "structured://")
    return check_sources(ConfigLoaderImpl(search))


class Composer:
    """Composes one named config under any overrides."""

    def __init__(self, name: str, folders: Sequence[Path | None]) -> None:
        self.folders = _there(folders)
        self.loader = _loader(self.folders)
        self.stamps = _stamps() if set(self.folders) <= {PACKAGED} else None
        self.overrides = Overrides(self.loader)
        self.name = name
        self.bases: dict[tuple[str, ...], DictConfig] = {}
        self.plain: dict[tuple[str, ...], dict[str, Any] | None] = {}
        known = options(self.loader, "")
        if name not in known:
            raise UserError(
                f"conf={name}: no such config{nearest(name, known)}; known are {', '.join(known)}, or give the path"
                " of a .yaml file, or a folder of your own with --config-dir"
            )
        if self._job() == COMMAND:
            self.overrides.groups.discard("recipe")  # which is a word for its program

    def _job(self) -> Any:
        """The job of the config; None where it cannot be composed as it is."""
        try:
            config, _ = self._load((), RunMode.RUN)
            return config.get("job")
        except UserError:
            return None

    def grid(self, texts: Sequence[str]) -> Grid:
        """The grid of all points; a point that repeats an earlier one is left out."""
        common = self.overrides.parse(texts)
        base, params = self._base(common)
        arms = self._arms(base, common)
        inner = {key for _, overrides in arms for key in overrides}
        params = [o for key, o in self.overrides.parse(params).items() if key not in common and key not in inner]
        outer = [*params, *common.values()]
        check_size(self._size(arms, outer), f"conf={self.name}")
        points, differences, keys = self._points(arms, outer)
        named = labels(differences.values())
        labelled = [
            replace(point, arm=named[own].arm, settings=named[own].settings)
            for point, own in zip(points.values(), differences.values(), strict=True)
        ]
        return with_study(labelled, parse_study(keys))

    def _points(
        self, arms: Sequence[tuple[str, dict[str, Override]]], outer: Sequence[Override]
    ) -> tuple[dict[str, GridPoint], dict[str, Difference], dict[str, Any]]:
        """Return the points without labels and their differences, both by content, and the keys of the study."""
        points: dict[str, GridPoint] = {}
        differences: dict[str, Difference] = {}
        keys: dict[str, Any] = {}
        for arm, own in arms:
            overrides = [*own.values(), *outer]
            for choice in itertools.product(*map(self.overrides.choices, overrides)):
                config = self.compose(choice)
                config["sweep"] = config.get("sweep") or self.name
                name_recipe(config)
                if config.get("job") in COMPARED:
                    keys = {key: config.pop(key) for key in STUDY_KEYS if key in config}
                swept = [text for text, o in zip(choice, overrides, strict=True) if o.is_sweep_override()]
                content = json.dumps([arm, config])
                if content not in points:
                    differences[content] = difference(arm, config, choice, swept, self.compose)
                    points[content] = GridPoint(
                        config=config, arm="", changed=(*choice[: len(own)], *swept),
                        overrides=_of_one_arm(choice, keys) if arm else choice,
                        whole=not differences[content].fields and not any(key.startswith("recipe.") for key in own),
                    )  # fmt: skip
        return points, differences, keys

    def _size(self, arms: Sequence[tuple[str, dict[str, Override]]], outer: Sequence[Override]) -> int:
        """Return the number of points, including points that repeat others."""
        counts = [math.prod(len(self.overrides.choices(o)) for o in own.values()) for _, own in arms]
        return sum(counts) * math.prod(len(self.overrides.choices(o)) for o in outer)

    def _arms(self, base: DictConfig, common: dict[str, Override]) -> list[tuple[str, dict[str, Override]]]:
        """Return the sweep's named arms, or the arms of its factorial design, with their overrides by key. Without any,
        return one nameless arm without overrides."""
        named = {}
        for key in (ARMS, FACTORIAL):
            stated = common[key].value() if key in common else base.get(key)
            named[key] = OmegaConf.to_container(stated) if OmegaConf.is_config(stated) else stated
        for key, override in common.items():
            if key.startswith(f"{FACTORIAL}.") and isinstance(named[FACTORIAL], dict):
                named[FACTORIAL] = named[FACTORIAL] | {key.partition(".")[2]: override.value()}
        study = parse_study(named)
        named = study.arms or (study.factorial and study.factorial.arms)
        if named is None:
            return [("", {})]
        return [(name, self._overrides_of(name, override_texts(keys), common)) for name, keys in named.items()]

    def _overrides_of(self, arm: str, texts: Sequence[str], common: dict[str, Override]) -> dict[str, Override]:
        """Overrides by key of an arm that the sweep names."""
        try:
            overrides = self.overrides.parse(texts)
        except UserError as error:
            raise UserError(f"arms.{arm}: {error}") from None
        check_arm(arm, overrides, common, (*NOT_IN_ID, *STUDY_KEYS, "seed"))
        return overrides

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """One resolved config; `overrides` hold no sweep.

        Numbers that nothing else depends on, such as seeds, are set in a copy of the config without them: OmegaConf
        takes a hundred times as long for each.
        """
        numbers = {
            key: value for key, _, value in (text.partition("=") for text in overrides) if _NUMBER.fullmatch(value)
        }
        rest = tuple(text for text in overrides if text.partition("=")[0] not in numbers)
        if rest not in self.plain:
            self.plain[rest] = self._compose(rest)
        config = copy.deepcopy(self.plain[rest])
        if config is None or not all(set_number(config, key, yaml.safe_load(v)) for key, v in numbers.items()):
            return resolved(self._merge(overrides))
        return config

    def _compose(self, overrides: Sequence[str]) -> dict[str, Any] | None:
        """The resolved config, or None where a value in it refers to another, or to one that is not there yet."""
        config = self._merge(overrides)
        return None if re.search(r"\$\{|\?\?\?", str(OmegaConf.to_container(config))) else resolved(config)

    def _merge(self, overrides: Sequence[str]) -> DictConfig:
        """The config under the overrides, not resolved."""
        parsed = self.overrides.parse_checked(overrides)
        groups = tuple(o.input_line for o in parsed if self.overrides.is_group(o))
        if groups not in self.bases:
            self.bases[groups] = self._other_model(groups)
        config = copy.deepcopy(self.bases[groups])
        takes_recipe = "recipe" in self.overrides.groups
        factories = [o for o in parsed if takes_recipe and o.key_or_group in FACTORY_KEYS]
        builder = next((o for o in parsed if o.key_or_group == MODEL_TARGET), None)
        try:
            if builder is not None:
                take_factory(config)
            if any(o.key_or_group == DATA_TARGET for o in parsed):
                config["data"] = {"source": "factory"}
            for override in factories:
                path = str(override.value())
                config["recipe"] = {"name": path.rpartition(".")[2], "qfactory": path}
            for override in parsed:
                if takes_recipe and is_text(override):
                    path = str(override.value())
                    config["recipe"] = {"name": Path(path).stem} | load_recipe(path)
            check_gemms(parsed)
            # fields of grouped_linear come after linear, whose quantizers it has where the recipe does not spell it out
            for override in sorted(parsed, key=lambda o: o.key_or_group.startswith("recipe.grouped_linear.")):
                own_text = takes_recipe and is_text(override)
                if not self.overrides.is_group(override) and not own_text and override not in factories:
                    check_texts(override.key_or_group, override.value())
                    open_quantizers(config, override.key_or_group)
                    OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise UserError(f"override '{override.input_line}': {one_line(error)}") from None
        return config

    def _load(self, groups: Sequence[str], mode: RunMode) -> tuple[DictConfig, list[str]]:
        """Return _composed() of the named config under a choice of groups. The config is not to be changed."""
        if self.stamps is None:
            return _composed(self.loader, self.name, groups, mode)
        return _packaged(self.name, tuple(groups), mode, self.folders, self.stamps)

    def _other_model(self, groups: Sequence[str]) -> DictConfig:
        """The config under the groups, without the keys for the GPT in its YAML where the groups of the command line
        chose another model."""
        config, _ = self._load(groups, RunMode.RUN)
        if is_users(config):
            before, _ = self._load([text for text in groups if not text.startswith("model=")], RunMode.RUN)
            if not is_users(before):
                config = copy.deepcopy(config)
                drop_gpt(config)
        return config

    def _base(self, overrides: dict[str, Override]) -> tuple[DictConfig, list[str]]:
        """Return _composed() under the groups that are chosen for all points."""
        fixed = [o.input_line for o in overrides.values() if self.overrides.is_group(o) and not o.is_sweep_override()]
        return self._load(fixed, RunMode.MULTIRUN)


def _of_one_arm(choice: Sequence[str], keys: dict[str, Any]) -> tuple[str, ...]:
    """The overrides of a point of a named arm, for the sweep without its arms or its design; keys: of the study."""
    if keys.get(FACTORIAL) is None:
        return (f"{ARMS}=null", *choice)
    return (f"{FACTORIAL}=null", *(text for text in choice if not text.startswith(f"{FACTORIAL}.")))


def _composed(
    loader: ConfigLoaderImpl, name: str, groups: Sequence[str], mode: RunMode
) -> tuple[DictConfig, list[str]]:
    """Hydra's composition by a loader, open for unknown keys, and its `hydra.sweeper.params` as override texts."""
    try:
        with warnings.catch_warnings(action="ignore"):  # without _self_ a YAML's own values win, which is meant
            config = loader.load_configuration(name, list(groups), mode)
        plain = OmegaConf.to_container(config)
        params = plain.pop("hydra")["sweeper"].get("params")  # all else there is Hydra's own, with its resolvers
        check_expansion(plain | {"hydra": {"sweeper": {"params": params}}}, "the config")
    except Exception as error:  # a YAML can make Hydra and PyYAML raise anything: AttributeError by !!timestamp 1
        raise UserError(f"conf={name}: {explain(error)}") from None
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    texts = [f"{key}={value}" for key, value in params.items()]
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return config, texts


@functools.lru_cache(maxsize=128)
def _packaged(
    name: str, groups: tuple[str, ...], mode: RunMode, folders: tuple[Path, ...], stamps: Stamps
) -> tuple[DictConfig, list[str]]:
    """_composed() of packaged configs alone. stamps: of their files, which are read again after a change."""
    return _composed(_packaged_loader(folders, stamps), name, groups, mode)


@functools.lru_cache(maxsize=4)
def _packaged_loader(folders: tuple[Path, ...], stamps: Stamps) -> ConfigLoaderImpl:
    """Return a loader of packaged configs. It keeps the files that it reads: to read them is half of a composition."""
    return _loader(folders)


def _stamps() -> Stamps:
    files = ((path, path.stat()) for path in sorted(PACKAGED.rglob("*.yaml")))
    return tuple((str(path), stat.st_mtime_ns, stat.st_size) for path, stat in files)


def _yaml_names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.yaml")]
