"""Folders of torch.distributed.checkpoint: their contents, and their tensors, each read from its bytes by
torch.load(weights_only=True).
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.checkpoints.checkpoint import Checkpoint, first_names, step_in_name
from hqsweep.checkpoints.dcp_metadata import METADATA, Chunk, Place, Stored, count_of, tensors_of
from hqsweep.checkpoints.torch_file import load
from hqsweep.errors import UserError
from hqsweep.recipe.roles import clean_name

NOT_MODEL = (
    "optimizer",
    "optim",
    "lr_scheduler",
    "dataloader",
    "train_state",
    "trainer",
    "rng",
    "ft_dataloader",
    "hqsweep",
)
"""The top names that torchtitan and others use beside the weights."""
TIED = "tied"
"""The name under hqsweep of a mark for each weight that save_sharded has written once more, by another of its names."""
MODELS = ("model", "app.model", "state_dict", "module")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def inspect_folder(folder: Path) -> Checkpoint:
    """The description of a folder, by its .metadata; each chunk's bytes must be there."""
    return inspect_tensors(folder)[0]


def inspect_tensors(folder: Path) -> tuple[Checkpoint, dict[str, Stored]]:
    """Return the description of a folder, and its tensors by their saved names.

    If .metadata cannot be read, there are no tensors, and the description has the problem. .metadata is read once,
    because that takes long.
    """
    stored: dict[str, Stored] = {}
    try:
        stored = tensors_of(folder)
        problems = _missing_bytes(folder, stored)
    except UserError as error:
        problems = [str(error)]
    weights = _weights(stored)
    files = sorted({chunk.file for tensor in stored.values() for chunk in tensor.chunks})
    moments = any(parts is not None and parts[1] in MOMENTS[1:] for parts in map(_moment, stored.values()))
    checkpoint = Checkpoint(
        path=folder,
        kind="dcp",
        step=step_in_name(folder),
        tensors={name: (stored[saved].shape, stored[saved].dtype) for name, saved in weights.items()},
        optimizer="named" if moments else "none",
        problems=tuple(problems or ([] if weights else ["it holds no tensors of a model"])),
        files=tuple(path for path in (folder / METADATA, *(folder / name for name in files)) if path.is_file()),
        saved_as=weights,
    )
    return checkpoint, stored


def _missing_bytes(folder: Path, stored: dict[str, Stored]) -> list[str]:
    """Why the files of chunks cannot be read; empty where they can."""
    ends: dict[str, int] = {}
    for tensor in stored.values():
        for chunk in tensor.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    missing = [name for name in sorted(ends) if not (folder / name).is_file()]
    if missing:
        return [f"{len(missing)} of its {len(ends)} files are not there: {first_names(missing)}; copy it again"]
    short = [name for name in sorted(ends) if (folder / name).stat().st_size < ends[name]]
    return [f"{name} has {(folder / name).stat().st_size} of its {ends[name]} bytes; copy it again" for name in short]


def _weights(stored: dict[str, Stored]) -> dict[str, str]:
    """Clean name of a model's tensor -> its saved name; tied ones once, where marks say so."""
    by_name = {}
    for saved, tensor in stored.items():
        first, *rest = tensor.path
        if rest and first in MODELS:
            by_name[clean_name(".".join(rest))] = saved
        elif saved.partition(".")[0] not in NOT_MODEL:
            by_name[clean_name(saved)] = saved
    return {name: saved for name, saved in by_name.items() if f"hqsweep.{TIED}.{name}" not in stored}


def _moment(tensor: Stored) -> tuple[str, str] | None:
    """(clean name of a parameter, "exp_avg") for a tensor of the optimizer; None for any other tensor."""
    if tensor.path[0] not in ("optimizer", "optim"):
        return None
    words = ".".join(tensor.path[1:]).removeprefix("state.")
    name, _, kind = words.rpartition(".")
    return (clean_name(name), kind) if name and not words.startswith("param_groups.") else None


def read(checkpoint: Checkpoint) -> dict[str, Any]:
    """The model's tensors on the CPU, by their clean names. UserError for bytes that are not a tensor."""
    stored = tensors_of(checkpoint.path)
    return {name: read_part(checkpoint.path, saved, stored[saved]) for name, saved in _weights(stored).items()}


def read_moments(folder: Path) -> dict[str, dict[str, Any]]:
    """Clean name of a parameter -> its "step", "exp_avg", "exp_avg_sq", and the other entries of its state."""
    moments: dict[str, dict[str, Any]] = {}
    for saved, tensor in tensors_of(folder).items():
        if (place := _moment(tensor)) is not None:
            moments.setdefault(place[0], {})[place[1]] = read_part(folder, saved, tensor)
    return moments


@dataclass(frozen=True, kw_only=True)
class Box:
    """The place of a part in its whole: the index of its first element, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def read_part(folder: Path, name: str, stored: Stored, box: Box | None = None) -> Any:
    """A part of a tensor on the CPU, by default all of it, from the chunks that overlap it. UserError for bytes that
    are not such a tensor."""
    import torch

    dtype = getattr(torch, stored.dtype)
    box = box or Box(offsets=(0,) * len(stored.shape), shape=stored.shape)
    for chunk in stored.chunks:
        if chunk.length < count_of(chunk.shape) * dtype.itemsize:
            raise UserError(f"{folder / chunk.file}: {name} has more numbers than bytes; copy or save it again")
    part = torch.empty(box.shape, dtype=dtype)
    for chunk in stored.chunks:
        common = [_common(*both) for both in zip(chunk.offsets, chunk.shape, box.offsets, box.shape, strict=True)]
        if all(first < last for first, last in common):
            there, here = (_slices(common, offsets) for offsets in (chunk.offsets, box.offsets))
            part[here] = _read_chunk(folder, name, chunk)[there]
    return part


def _common(first: int, size: int, other: int, other_size: int) -> tuple[int, int]:
    """The overlap of two ranges, as (first, last + 1)."""
    return max(first, other), min(first + size, other + other_size)


def _slices(ranges: list[tuple[int, int]], offsets: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first - offset, last - offset) for (first, last), offset in zip(ranges, offsets, strict=True))


def read_object(folder: Path, name: str, place: Place) -> Any:
    """An object made of numbers, texts, tuples and the like. UserError for any other bytes; their code is not run."""
    return _read(folder, name, place, "number and no text")


def _read_chunk(folder: Path, name: str, chunk: Chunk) -> Any:
    return _read(folder, name, chunk, "such tensor")


def _read(folder: Path, name: str, place: Place, what: str) -> Any:
    """Read the bytes at a place by torch.load(weights_only=True); a chunk must have its shape."""
    with (folder / place.file).open("rb") as file:
        file.seek(place.start)
        content = file.read(place.length)
    try:
        value = load(io.BytesIO(content))
        if isinstance(place, Chunk) and tuple(value.shape) != place.shape:
            raise ValueError(f"it has the shape {tuple(value.shape)}, not {place.shape}")
        return value
    except Exception as error:  # foreign bytes make torch.load raise anything
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"{folder / place.file}: the bytes of {name} are no {what} ({why})") from None
