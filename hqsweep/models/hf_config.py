"""What config.json of a Hugging Face model says, read without torch and without transformers."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.models.gguf import gguf_folder, is_gguf

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
WANTED = "give the folder of a Hugging Face model, or its config.json"
KINDS = "a folder of Hugging Face, a .gguf file, or a .safetensors file with config.json beside it"
SAFETENSORS = ".safetensors"
_PART = re.compile(r"-\d+-of-\d+$")
WEIGHTS = (SAFETENSORS, ".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files of tensors."""
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
"""The keys of the largest number of positions, by families of models."""
WRITER = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""The keys that say how a config was written, or in which dtype its weights are saved; weights are always read as
float32."""


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """A config.json. A larger model, such as one with images, has the keys of its language model in text_config."""

    path: Path
    keys: Mapping[str, Any]
    weights: Path | None = None
    """The file of safetensors that was named; None where a folder or the config was."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def model_type(self) -> str:
        return self.keys["model_type"]

    @property
    def text(self) -> Mapping[str, Any]:
        """The keys of the language model."""
        nested = self.keys.get("text_config")
        return nested if isinstance(nested, Mapping) else self.keys

    @property
    def vocab_size(self) -> int | None:
        """The rows of the embedding; None where the config does not say."""
        return self._count("vocab_size")

    @property
    def context(self) -> int | None:
        """The most positions that a sequence can have; None where the config does not say."""
        return next(filter(None, map(self._count, CONTEXT)), None)

    @property
    def tied(self) -> bool | None:
        """Whether the output projection shares the embedding's weight; None where the default of its family decides."""
        said = self.text.get("tie_word_embeddings", self.keys.get("tie_word_embeddings"))
        return said if isinstance(said, bool) else None

    @property
    def dropout(self) -> bool:
        """Whether training draws random numbers."""
        return any("drop" in key and isinstance(v, int | float) and v > 0 for key, v in self.text.items())

    @property
    def digest(self) -> str:
        """The SHA-256 of the config's content, in hex, without the keys of its writer."""
        content = {key: value for key, value in self.keys.items() if key not in WRITER}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _count(self, key: str) -> int | None:
        value = self.text.get(key, self.keys.get(key))
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def read_hf_config(path: str | Path, where: str = "model.path") -> HFConfig:
    """The config of a folder, or in a file. UserError, which begins with `where`, where there is none, or one that
    needs code of its author to be run."""
    named = Path(path)
    file = _config_file(named, where)
    try:
        keys = loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{where}: '{file}' is no JSON ({str(error).splitlines()[0]}); {WANTED}") from None
    _check_keys(keys, file, where)
    return HFConfig(path=file, keys=keys, weights=named if named.suffix == SAFETENSORS else None)


def _config_file(path: Path, where: str) -> Path:
    """Return the config's file: `path`, the one in the folder, beside safetensors, or made of GGUF. UserError if there
    is none, or for other files."""
    if is_gguf(path):
        return gguf_folder(path, where) / CONFIG
    if path.suffix == SAFETENSORS and path.is_file() and path.with_name(CONFIG).is_file():
        if _PART.search(path.stem):
            raise UserError(f"{where}: '{path}' is one of several files of weights; give their folder, {path.parent}")
        return path.with_name(CONFIG)
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        has = f"has no {CONFIG}" if path.is_dir() else "is not there"
        raise UserError(f"{where}: '{path}' {has}; {WANTED}")
    if path.is_dir() and (path / ADAPTER).exists():  # transformers would add it to the model
        raise UserError(
            f"{where}: '{path}' has {ADAPTER}, so its weights are an adapter's or have one beside them; merge it into"
            " the model (merge_and_unload), and save that"
        )
    if file.suffix in WEIGHTS:
        raise UserError(
            f"{where}: '{file}' is a checkpoint, and does not say of which model; give the folder of a Hugging Face"
            f" model, or its {CONFIG} with model.pretrained=false, and for forks fork.trunk={file}"
        )
    return file


def _check_keys(keys: Any, file: Path, where: str) -> None:
    """Raise UserError for keys of no model, for a model with its own code, and for quantized weights."""
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise UserError(f"{where}: '{file}' has no model_type, so it is no config of a Hugging Face model; {WANTED}")
    own_code = next((name for name in _code(keys)), None)
    if own_code is not None:
        raise UserError(
            f"{where}: '{file}' has auto_map, so the model is code of its own ({own_code}), which is never run; build"
            " it by model._target_ from a module that you trust"
        )
    if "quantization_config" in keys:
        raise UserError(
            f"{where}: '{file}' has quantization_config, so its weights are quantized; give the model that they were"
            " made from"
        )


def _code(keys: Mapping[str, Any]) -> list[str]:
    """The code that auto_map names, here or in a part."""
    parts = [keys, *(part for part in keys.values() if isinstance(part, Mapping))]
    maps = [part["auto_map"] for part in parts if part.get("auto_map")]
    return [str(next(iter(mapping.values()))) if isinstance(mapping, Mapping) else str(mapping) for mapping in maps]
