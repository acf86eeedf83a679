"""Folders of torch.distributed.checkpoint: .metadata says which tensors there are and in which bytes of which file.

.metadata is a pickle, which torch reads by pickle.load: a forged one runs any code. Here it is read by an unpickler
that knows a few names, each of which stands for a plain record of this module; no name leads to a class or a function
of torch or of Python. Tensors are read by torch.load(weights_only=True), each from its bytes.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.checkpoints.huggingface import step_in_name
from hqsweep.errors import UserError
from hqsweep.models.names import clean_name

METADATA = ".metadata"
MOST_METADATA = 2**30
"""Bytes of .metadata at most."""
PLACES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
NOT_MODEL = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state", "trainer", "rng", "ft_dataloader")
"""What torchtitan and others keep beside the weights, whose names are at the top."""
MODELS = ("model", "app.model", "state_dict", "module")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class _Record:
    """Stands for an object of torch's metadata: its fields as attributes, nothing else."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})
        else:
            self.values = state


class _Bytes(_Record):
    """A BytesStorageMetadata: an object that is no tensor."""


class _Index(_Record):
    """A MetadataIndex: a tensor's name, and the offsets of a chunk of it."""

    fqn: Any = None
    offset: Any = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


def _value(*values: Any) -> Any:
    """Stands for a function or an enumeration whose result is of no use here."""
    return values[0] if values else None


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _path(*parts: str) -> str:
    return "/".join(parts)


STANDS_FOR: dict[tuple[str, str], Any] = {
    (place, name): record
    for place in PLACES
    for name, record in {
        "Metadata": _Record,
        "TensorStorageMetadata": _Record,
        "ChunkStorageMetadata": _Record,
        "TensorProperties": _Record,
        "StorageMeta": _Record,
        "_StorageInfo": _Record,
        "BytesStorageMetadata": _Bytes,
        "MetadataIndex": _Index,
        "_MEM_FORMAT_ENCODING": _value,
    }.items()
} | {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _value,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
}
"""What a name in .metadata stands for; dtypes of torch stand for their names, and all else is refused."""
DTYPES = {
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64", "complex128",
}  # fmt: skip


class _Unpickler(pickle._Unpickler):  # that in Python: the other's memo grows to any number that a file names
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        try:
            return STANDS_FOR[module, name]
        except KeyError:
            raise UserError(
                f"its {METADATA} asks for {module}.{name}, which no checkpoint needs; it is refused, and nothing of it"
                " was run"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        raise UserError(f"its {METADATA} refers to objects outside of it, which no checkpoint does")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it is in it, its shape, and its bytes in a file of the folder."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder by its saved name."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    path: tuple[str, ...]
    """The keys that lead to it in the nested state_dict that was saved."""


def inspect_folder(folder: Path) -> Checkpoint:
    """What a folder holds, by its .metadata; each chunk's bytes must be there."""
    stored: dict[str, Stored] = {}
    try:
        stored = tensors_of(folder)
        problems = _missing_bytes(folder, stored)
    except UserError as error:
        problems = [str(error)]
    weights = _weights(stored)
    files = sorted({chunk.file for each in stored.values() for chunk in each.chunks})
    moments = any(parts is not None and parts[1] in MOMENTS[1:] for parts in map(_moment, stored.values()))
    return Checkpoint(
        path=folder,
        kind="dcp",
        step=step_in_name(folder),
        tensors={name: (stored[saved].shape, stored[saved].dtype) for name, saved in weights.items()},
        optimizer="named" if moments else "none",
        problems=tuple(problems or ([] if weights else ["it holds no tensors of a model"])),
        files=tuple(path for path in (folder / METADATA, *(folder / name for name in files)) if path.is_file()),
        saved_as=weights,
    )


def tensors_of(folder: Path) -> dict[str, Stored]:
    """Saved name -> where the tensor is. UserError for a .metadata that is not there, no metadata, or asks for more."""
    path = folder / METADATA
    if not path.is_file():
        raise UserError(f"it has no {METADATA}, which is written last: half a checkpoint; copy or save it again")
    if path.stat().st_size > MOST_METADATA:
        raise UserError(f"its {METADATA} has more than {MOST_METADATA} bytes")
    try:
        return _stored(_Unpickler(io.BytesIO(path.read_bytes())).load())
    except (UserError, OSError):
        raise
    except Exception as error:  # garbage makes an unpickler raise anything
        raise UserError(f"its {METADATA} is cut short or damaged ({type(error).__name__}); copy it again") from None


def _stored(document: Any) -> dict[str, Stored]:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {
        (index.fqn, index.offset): info for index, info in document.storage_data.items()
    }
    paths = document.planner_data or {}
    found = {}
    for name, facts in document.state_dict_metadata.items():
        if isinstance(facts, _Bytes):
            continue
        chunks = tuple(_chunk(name, chunk, places) for chunk in facts.chunks)
        shape, dtype = _sizes(facts.size), facts.properties.values[0]
        if dtype not in DTYPES:
            raise ValueError(name)
        if sum(_count(chunk.shape) for chunk in chunks) != _count(shape):
            raise UserError(f"its {METADATA} has not all parts of {name}; copy or save it again")
        found[_text(name)] = Stored(
            shape, dtype, chunks, tuple(str(key) for key in map(_key, paths.get(name, (name,))))
        )
    return found


def _chunk(name: str, chunk: Any, places: dict[tuple[str, tuple[int, ...] | None], Any]) -> Chunk:
    offsets = _sizes(chunk.offsets)
    info = places[name, offsets]
    file = _text(info.relative_path)
    if Path(file).name != file or file in (".", ".."):
        raise UserError(f"its {METADATA} names the file {file!r}, which is none of its folder")
    if getattr(info, "transform_descriptors", None):
        raise UserError(f"{name} is stored compressed; save it without extensions")
    return Chunk(offsets, _sizes(chunk.sizes), file, int(info.offset), int(info.length))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _key(value: Any) -> str | int:
    """A key or an index of a nested state_dict."""
    return value if isinstance(value, int) else _text(value)


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(int(value) for value in values)
    if any(size < 0 for size in sizes):
        raise ValueError(sizes)
    return sizes


def _count(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _missing_bytes(folder: Path, stored: dict[str, Stored]) -> list[str]:
    """What is wrong with the files of chunks."""
    ends: dict[str, int] = {}
    for each in stored.values():
        for chunk in each.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    missing = [name for name in sorted(ends) if not (folder / name).is_file()]
    if missing:
        return [f"{len(missing)} of its {len(ends)} files are not there: {first_names(missing)}; copy it again"]
    short = [name for name in sorted(ends) if (folder / name).stat().st_size < ends[name]]
    return [f"{name} has {(folder / name).stat().st_size} of its {ends[name]} bytes; copy it again" for name in short]


def _weights(stored: dict[str, Stored]) -> dict[str, str]:
    """Clean name of a tensor of the model -> its saved name."""
    found = {}
    for saved, each in stored.items():
        first, *rest = each.path
        if rest and first in MODELS:
            found[clean_name(".".join(rest))] = saved
        elif saved.partition(".")[0] not in NOT_MODEL:
            found[clean_name(saved)] = saved
    return found


def _moment(each: Stored) -> tuple[str, str] | None:
    """(clean name of a parameter, "exp_avg") of a tensor of the optimizer's state; None for any other tensor."""
    if each.path[0] not in ("optimizer", "optim"):
        return None
    words = ".".join(each.path[1:]).removeprefix("state.")
    name, _, kind = words.rpartition(".")
    return (clean_name(name), kind) if name and not words.startswith("param_groups.") else None


def read(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tensors of the model on the CPU, by their clean names. UserError for bytes that are no tensor."""
    stored = tensors_of(checkpoint.path)
    return {name: _tensor(checkpoint.path, saved, stored[saved]) for name, saved in _weights(stored).items()}


def read_moments(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Clean name of a parameter -> its "step", "exp_avg", "exp_avg_sq", and what else its state holds."""
    moments: dict[str, dict[str, Any]] = {}
    for saved, each in tensors_of(checkpoint.path).items():
        if (found := _moment(each)) is not None:
            moments.setdefault(found[0], {})[found[1]] = _tensor(checkpoint.path, saved, each)
    return moments


def _tensor(folder: Path, name: str, stored: Stored) -> Any:
    import torch

    dtype = getattr(torch, stored.dtype)
    for chunk in stored.chunks:
        if chunk.length < _count(chunk.shape) * dtype.itemsize:
            raise UserError(f"{folder / chunk.file}: {name} has more numbers than bytes; copy or save it again")
    whole = torch.empty(stored.shape, dtype=dtype)
    for chunk in stored.chunks:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            content = file.read(chunk.length)
        try:
            part = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            target = whole[tuple(slice(o, o + size) for o, size in zip(chunk.offsets, chunk.shape, strict=True))]
            if tuple(part.shape) != chunk.shape or target.shape != part.shape:
                raise ValueError(f"it has the shape {tuple(part.shape)}, not {chunk.shape}")
            target.copy_(part)
        except Exception as error:  # bytes of others make torch.load raise anything
            why = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise UserError(f"{folder / chunk.file}: the bytes of {name} are no such tensor ({why})") from None
    return whole
