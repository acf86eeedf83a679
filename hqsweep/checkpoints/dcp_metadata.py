"""The .metadata of a folder of torch.distributed.checkpoint: its tensors, and the file and the bytes of each.

It is a pickle, and torch reads it by pickle.load: a forged one runs any code. Here an unpickler reads it that knows a
few names, each of which stands for a plain record of this module. A name never leads to a class or a function of torch
or of Python. An allow-list of torch's own records would need seconds to import torch, and let a forged file set
attributes of torch's classes (BUILD on a class, tried with torch 2.13).
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hqsweep.errors import UserError

T = TypeVar("T")
Places = dict[tuple[str, tuple[int, ...] | None], Any]
"""(name, offsets of a chunk; None for an object) -> torch's record of its bytes."""
METADATA = ".metadata"
MOST_METADATA = 2**30
"""The most bytes of .metadata."""
PLACES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _Record:
    """The substitute of a record in torch's metadata: its fields as attributes."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(name): value for name, value in state.items()})
        else:
            self.values = state


class _Bytes(_Record):
    """A BytesStorageMetadata: an object other than a tensor."""


class _Index(_Record):
    """A MetadataIndex: the name of a tensor, and the offsets of a chunk."""

    fqn: Any = None
    offset: Any = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


def _value(*values: Any) -> Any:
    """The substitute of a function or an enumeration whose result is not used here."""
    return values[0] if values else None


def _memory_format(*values: Any) -> Any:
    """The substitute of torch.memory_format."""
    return _value(*values)


def _member(owner: Any = None, name: Any = None) -> Any:
    """Return the member of an enumeration, in place of getattr, with which Python before 3.11.4 pickles it."""
    if owner is not _memory_format:
        raise _refused("builtins", "getattr")
    return name


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
        "_MEM_FORMAT_ENCODING": _memory_format,
    }.items()
} | {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _value,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
}
"""Name in .metadata -> its substitute; dtypes of torch become their names, and all others are refused."""
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
            raise _refused(module, name) from None

    def persistent_load(self, pid: Any) -> Any:
        raise UserError(f"its {METADATA} refers to objects outside of it, which no checkpoint does")


def _refused(module: str, name: str) -> UserError:
    asks = f"its {METADATA} asks for {module}.{name}, which no checkpoint needs"
    return UserError(f"{asks}; it is refused, and nothing of it was run")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes in a file of the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Chunk(Place):
    """A part of a tensor: its place in the tensor, its shape, and its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder by its saved name."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    path: tuple[str, ...]
    """The keys that lead to it in the nested state_dict that was saved."""


def tensors_of(folder: Path) -> dict[str, Stored]:
    """Saved name -> the place of the tensor. UserError for a .metadata that is missing, damaged, or asks for more."""
    return _read(folder, _stored)


def objects_of(folder: Path) -> dict[str, Place]:
    """Saved name -> the place of each object other than a tensor. UserError as tensors_of raises it."""
    return _read(folder, _objects)


def _read(folder: Path, what: Callable[[Any], T]) -> T:
    """Read the document in .metadata, and return what(document)."""
    path = folder / METADATA
    if not path.is_file():
        raise UserError(f"it has no {METADATA}, which is written last: half a checkpoint; copy or save it again")
    if path.stat().st_size > MOST_METADATA:
        raise UserError(f"its {METADATA} has more than {MOST_METADATA} bytes")
    try:
        return what(_Unpickler(io.BytesIO(path.read_bytes())).load())
    except (UserError, OSError):
        raise
    except Exception as error:  # garbage makes an unpickler raise anything
        raise UserError(f"its {METADATA} is cut short or damaged ({type(error).__name__}); copy it again") from None


def _stored(document: Any) -> dict[str, Stored]:
    places, paths = _places(document), document.planner_data or {}
    tensors = {}
    for name, metadata in document.state_dict_metadata.items():
        if isinstance(metadata, _Bytes):
            continue
        chunks = tuple(_chunk(name, chunk, places) for chunk in metadata.chunks)
        shape, dtype = _sizes(metadata.size), metadata.properties.values[0]
        if dtype not in DTYPES:
            raise ValueError(name)
        if sum(count_of(chunk.shape) for chunk in chunks) != count_of(shape):
            raise UserError(f"its {METADATA} has not all parts of {name}; copy or save it again")
        tensors[_text(name)] = Stored(
            shape, dtype, chunks, tuple(str(key) for key in map(_key, paths.get(name, (name,))))
        )
    return tensors


def _objects(document: Any) -> dict[str, Place]:
    places, entries = _places(document), document.state_dict_metadata.items()
    return {
        _text(name): Place(**_bytes(name, places[name, None])) for name, kind in entries if isinstance(kind, _Bytes)
    }


def _places(document: Any) -> Places:
    return {(index.fqn, index.offset): info for index, info in document.storage_data.items()}


def _chunk(name: str, chunk: Any, places: Places) -> Chunk:
    offsets = _sizes(chunk.offsets)
    return Chunk(offsets=offsets, shape=_sizes(chunk.sizes), **_bytes(name, places[name, offsets]))


def _bytes(name: str, info: Any) -> dict[str, Any]:
    """The fields of a Place."""
    file = _text(info.relative_path)
    if Path(file).name != file or file in (".", ".."):
        raise UserError(f"its {METADATA} names the file {file!r}, which is none of its folder")
    if getattr(info, "transform_descriptors", None):
        raise UserError(f"{name} is stored compressed; save it without extensions")
    return {"file": file, "start": int(info.offset), "length": int(info.length)}


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


def count_of(shape: tuple[int, ...]) -> int:
    """How many numbers a tensor of this shape has."""
    result = 1
    for size in shape:
        result *= size
    return result
