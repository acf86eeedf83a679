"""Safetensors files and Hugging Face folders: their headers and tensors, and the optimizer's state beside weights.

The header of a safetensors file is its length, 8 bytes, and JSON of that length; offsets of tensors count from its end
(https://github.com/huggingface/safetensors#format). A folder of several such files has an index, whose weight_map says
in which file a tensor is. Headers and sizes alone show whether a folder is half written.
"""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.checkpoints import deepspeed
from hqsweep.checkpoints.checkpoint import Checkpoint, Tensors, first_names, step_in_name
from hqsweep.checkpoints.dcp_metadata import METADATA
from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.recipe.roles import clean_name

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MOST_HEADER = 100_000_000
"""The most bytes of a header, as in the library."""
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class Damage(Exception):
    """Why a safetensors file or index is not whole; a part of a sentence."""


def inspect_file(path: Path) -> Checkpoint:
    """The description of a safetensors file."""
    return _inspected(path, [path], [])


def inspect_folder(folder: Path) -> Checkpoint | None:
    """The description of a Hugging Face folder; None for a folder without safetensors."""
    problems: list[str] = []
    if (folder / INDEX).is_file():
        try:
            files = indexed(folder / INDEX)
        except Damage as damage:
            files, problems = [], [str(damage)]
    elif (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
        if not files:
            return None
        if len(files) > 1:
            problems = [f"{len(files)} files of weights and no {INDEX}: half a checkpoint; copy it again"]
    return _inspected(folder, files, problems)


def _inspected(path: Path, files: list[Path], problems: list[str]) -> Checkpoint:
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    saved_as: dict[str, str] = {}
    for file in files:
        try:
            for name, described in header(file).items():
                tensors[clean_name(name)], saved_as[clean_name(name)] = described, name
        except Damage as damage:
            problems.append(str(damage))
    folder = path if path.is_dir() else path.parent
    hashed = [file for file in files if file.is_file()]
    state, step = NO_STATE, None
    if path.is_dir():
        if (folder / INDEX).is_file():
            problems += _absent(folder / INDEX, tensors, saved_as, problems)
        state = state_beside(folder)
        problems += state.problems
        config = folder / "config.json"
        hashed += [*([config] if config.is_file() else ()), *state.hashed]
        step = trainer_step(folder)
    return Checkpoint(
        path=path,
        kind="safetensors",
        step=step,
        tensors=tensors,
        optimizer=state.kind,
        problems=tuple(problems),
        notes=state.notes,
        moments=state.paths,
        files=tuple(hashed),
        saved_as=saved_as,
    )


def header(file: Path) -> Tensors:
    """The tensors of a file, by its header. Raises Damage where the file is cut short, or of another kind."""
    document, start = _document(file)
    tensors, ends = {}, [0]
    try:
        for name, fields in document.items():
            if name == "__metadata__":
                continue
            shape, dtype = tuple(int(size) for size in fields["shape"]), str(fields["dtype"])
            tensors[name] = (shape, DTYPES.get(dtype, dtype.lower()))
            ends.append(int(fields["data_offsets"][1]))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        raise Damage(f"{file.name} is no safetensors file: its header describes no tensors") from None
    size = file.stat().st_size
    if size != start + max(ends):
        raise Damage(f"{file.name} has {size} bytes, and its header describes {start + max(ends)}: copy it again")
    return tensors


def _document(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON of a header, and the offset at which the tensors begin."""
    try:
        with file.open("rb") as opened:
            lead = opened.read(8)
            length = int.from_bytes(lead, "little")
            if len(lead) < 8 or length > MOST_HEADER:
                raise Damage(f"{file.name} is no safetensors file")
            text = opened.read(length)
    except FileNotFoundError:
        raise Damage(f"{file.name} is not there") from None
    if len(text) < length:
        raise Damage(f"{file.name} ends in its header: copy it again")
    try:
        document = loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Damage(f"{file.name} is no safetensors file: its header is no JSON")
    return document, 8 + length


def indexed(index: Path) -> list[Path]:
    """The files that an index names, all in its folder. Raises Damage."""
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("..", "."):
            raise Damage(f"{index.name} names the file {name!r}, which is none of its folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise Damage(f"{len(missing)} of the {len(names)} files of {index.name} are not there: {first_names(missing)}")
    return [index.parent / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = loads(index.read_bytes())["weight_map"]
        if isinstance(weight_map, dict) and weight_map:
            return weight_map
    except (ValueError, TypeError, KeyError):
        pass
    raise Damage(f"{index.name} is no index: it has no weight_map")


def _absent(index: Path, tensors: Tensors, saved_as: dict[str, str], known: list[str]) -> list[str]:
    """The tensors that an index names and its files lack, as problems; none where files are damaged already."""
    if known:
        return []
    there = set(saved_as.values())
    absent = [name for name in _weight_map(index) if name not in there]
    return [f"{index.name} names {len(absent)} tensors that its files lack: {first_names(absent)}"] if absent else []


def trainer_step(folder: Path) -> int | None:
    """The step that Hugging Face's Trainer wrote, or that the folder's name has."""
    try:
        step = loads((folder / "trainer_state.json").read_bytes())["global_step"]
        return int(step)
    except (OSError, ValueError, TypeError, KeyError):
        return step_in_name(folder)


def read(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the tensors of a checkpoint on the CPU, by their clean names. A tensor stored once for two names has both.

    UserError for a file that the library refuses.
    """
    from safetensors import SafetensorError

    from hqsweep.quant.serialize import load_safetensors

    tensors: dict[str, Any] = {}
    for file in _weights(checkpoint):
        try:
            tensors |= {clean_name(name): tensor for name, tensor in load_safetensors(file).items()}
        except SafetensorError as error:
            raise UserError(f"{file}: it is no whole safetensors file ({error})") from None
    return tensors


def _weights(checkpoint: Checkpoint) -> Iterator[Path]:
    return (file for file in checkpoint.files if file.suffix == ".safetensors")


FILES = ("optimizer.pt", "optimizer.bin")
"""The files of Hugging Face's Trainer, and of accelerate: a plain optimizer's state_dict, or FSDP's whole one, by
names."""
SHARDED = "optimizer_0"
"""The folder in which accelerate keeps FSDP's sharded state."""
RANKS = "optimizer_0_rank*.bin"


@dataclass(frozen=True, kw_only=True)
class StateBeside:
    """The optimizer's state beside weights. kind: as Checkpoint.optimizer; paths: as Checkpoint.moments; hashed: its
    files; problems and notes: as in Checkpoint."""

    kind: str = "none"
    paths: tuple[Path, ...] = ()
    hashed: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NO_STATE = StateBeside()


def state_beside(folder: Path) -> StateBeside:
    """The state beside the weights of a folder; no tensor is read."""
    for name in FILES:
        if (file := folder / name).is_file():
            if not zipfile.is_zipfile(file):
                fault = f"{name} is cut short, or no file of torch.save: copy it again, or take it out of the folder"
                return StateBeside(problems=(fault,))
            return StateBeside(kind="indexed" if name == FILES[0] else "named", paths=(file,), hashed=(file,))
    sharded = folder / SHARDED
    if (sharded / METADATA).is_file():
        files = (sharded / METADATA, *sorted(sharded.glob("*.distcp")))
        return StateBeside(kind="named", paths=(sharded,), hashed=files)
    if any(folder.glob(RANKS)):
        note = "the optimizer's state of FSDP is a file of each rank, which is not read; save it with use_dcp=True"
        return StateBeside(notes=(note,))
    if (folder / deepspeed.LATEST).is_file():
        files, fault = deepspeed.state_files(folder)
        if fault:
            return StateBeside(notes=(f"the optimizer's state of DeepSpeed is not read: {fault}",))
        return StateBeside(kind="named", paths=files, hashed=files)
    return NO_STATE
