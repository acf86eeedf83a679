"""GGUF files, each read once and kept as a folder of Hugging Face.

transformers and gguf do the reading: config, weights in float32, and the tokenizer. That takes seconds to minutes, and
every run of a sweep needs the model. So the folder is kept in the user's cache by the SHA-256 of the file. All else
reads the folder. Nothing here imports torch before a file is read for the first time.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hqsweep.errors import UserError
from hqsweep.host import CACHE, cache_folder, locked
from hqsweep.models.library import one_line, quietly, transformers

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
        raise UserError(f"{where}: '{file}' is no GGUF file, for it does not begin with GGUF; give one that does")
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
        del model.config.quantization_config  # or it is refused as a quantized model, which it is no more
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
