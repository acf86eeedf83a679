"""Hydra's reader of a folder of YAML files, with each file checked before it is read."""

import os
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from hqsweep.config.safe_yaml import check_file
from hqsweep.errors import UserError


class CheckedSource(FileConfigSource):
    """A folder of configs, of which each is within the bounds of parse_yaml and stands in the folder, and names no
    further places to search, of which Hydra would import some."""

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


def options(loader: ConfigLoaderImpl, group: str) -> list[str]:
    """Names that a config group offers; "" is the group of whole configs. Hydra's own start with an underscore."""
    return [name for name in loader.get_group_options(group) if not name.startswith("_")]
