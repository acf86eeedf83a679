"""Folders of Hugging Face, read without torch: what config.json says, GGUF files kept as such folders, and the package
transformers.

transformers and gguf read a GGUF file: its config, its weights in float32 and its tokenizer. That takes seconds to
minutes, and every run of a sweep needs the model. So the folder is kept in the user's cache, by the SHA-256 of the
file, and all other code reads the folder. Torch is imported only when a GGUF file is read for the first time.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.host import CACHE, cache_folder, locked


def transformers() -> Any:
    """The module, whose import takes seconds. UserError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "model: a Hugging Face model needs the package transformers; pip install 'hqsweep[models]'"
        ) from None
    return transformers


@contextmanager
def quietly() -> Iterator[None]:
    """Within this context transformers shows no progress bars, and no report that a UserError repeats."""
    logging = transformers().utils.logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def one_line(error: Exception) -> str:
    """The first line of an exception's message, or its type where it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


SUFFIX = ".gguf"
MAGIC = b"GGUF"
DIGITS = 16
WAIT_S = 3600.0
"""The seconds for which a process waits for another one that reads the same file."""
_HASHES: dict[tuple[str, int, int], str] = {}


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file, by its suffix."""
    return Path(path).suffix == SUFFIX


def gguf_digest(path: str | Path, where: str = "model.path") -> str:
    """SHA-256 of a GGUF file, in hex. A file that stayed as it was is read once a process.

    UserError, which begins with `where`, for a path without a file, and for a file of another kind.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            first = opened.read(len(MAGIC))
    except OSError as error:
        raise UserError(f"{where}: '{file}' cannot be read ({error.strerror}); give a GGUF file") from None
    if first != MAGIC:
        raise UserError(f"{where}: '{file}' is not a GGUF file: it does not begin with GGUF; give one that does")
    stat = file.stat()
    key = (str(file.resolve()), stat.st_size, stat.st_mtime_ns)
    if key not in _HASHES:
        with file.open("rb") as opened:
            _HASHES[key] = hashlib.file_digest(opened, "sha256").hexdigest()
    return _HASHES[key]


def gguf_folder(path: str | Path, where: str = "model.path") -> Path:
    """The folder of Hugging Face that holds a GGUF file's config, weights in float32, and tokenizer; made at first.

    Raises:
        UserError: begins with `where`; the file is of another kind, cut short, or of an architecture that transformers
            cannot read; or a package is missing.
    """
    file = Path(path)
    folder = cache_folder() / "gguf" / gguf_digest(file, where)[:DIGITS]
    if folder.is_dir():
        return folder
    missing = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{where}: '{file}' is a GGUF file, which needs the package {missing[0]}; pip install 'hqsweep[models]'"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{CACHE}: '{folder.parent}' cannot be made ({error.strerror}); give another folder") from None
    with locked(folder.with_name(f".{folder.name}.lock"), WAIT_S):
        if not folder.is_dir():
            print(f"{file.name}: read once, and kept in {folder}", file=sys.stderr, flush=True)
            _keep(file, folder, where)
    return folder


def _keep(file: Path, folder: Path, where: str) -> None:
    """Write the folder, all of it or nothing."""
    _check(file, where)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        _write(file, temporary, where)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(file: Path, where: str) -> None:
    """UserError for a file that ends before its tensors do, or whose header cannot be read."""
    from gguf import GGUFReader

    try:
        GGUFReader(str(file))
    except Exception as error:  # such as numpy's, of an array that is too short
        size = file.stat().st_size
        raise UserError(
            f"{where}: '{file}' is cut short or damaged at {size:,} bytes ({_why(error)}); copy it again"
        ) from None


def _write(file: Path, to: Path, where: str) -> None:
    import torch

    library = transformers()

    def read(function: Callable[..., Any], **options: Any) -> Any:
        try:
            return function(str(file.parent), gguf_file=file.name, **options)
        except Exception as error:  # of transformers, which may raise anything
            raise UserError(
                f"{where}: transformers {library.__version__} cannot read '{file}' ({_why(error)}); give the"
                " model's folder of Hugging Face"
            ) from None

    with quietly():
        model = read(library.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
        del model.config.quantization_config  # with it save_pretrained refuses the plain weights
        plain = type(model)(type(model.config)(**_keys(model.config)))
        plain.load_state_dict(model.state_dict(), strict=False)
        plain.tie_weights()
        plain.to(torch.float32).save_pretrained(to)
        with suppress(UserError):  # weights are of use without a tokenizer
            read(library.AutoTokenizer.from_pretrained).save_pretrained(to)


def _keys(config: Any) -> dict[str, Any]:
    left_out = ("quantization_config", "architectures")
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


def _why(error: Exception) -> str:
    return one_line(error).rstrip(".")
