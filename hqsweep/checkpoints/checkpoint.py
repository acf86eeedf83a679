"""Checkpoint: the description of a checkpoint before any of its tensors is read. Nothing here imports torch."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from hqsweep.errors import UserError

Kind = Literal["safetensors", "torch", "dcp", "hqsweep"]
Optimizer = Literal["none", "named", "indexed"]
Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Name of a tensor -> its shape, and its dtype as torch names it, such as "bfloat16"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint as its files describe it; no tensor was read.

    kind: "safetensors" (a Hugging Face folder, or a file), "torch" (a file of torch.save), "dcp" (a folder of
    torch.distributed.checkpoint, such as torchtitan's), "hqsweep" (step_N.pt of a run). tensors: the model's, by their
    names without wrappers. optimizer: whether it has moments, by names or by indices. problems: why it cannot be
    loaded, one sentence each. notes: which parts of it are not read.
    """

    path: Path
    kind: Kind
    step: int | None
    tensors: Tensors
    optimizer: Optimizer = "none"
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    moments: tuple[Path, ...] = ()
    """The paths of the optimizer's state, if it lies beside the weights: a file of torch.save, a folder of
    torch.distributed.checkpoint, or the files of DeepSpeed's ranks, in order."""
    weights: tuple[Path, ...] = ()
    """The files of torch.save in a folder that hold the weights; empty where path is such a file, or the weights are of
    another kind."""
    files: tuple[Path, ...] = field(repr=False)
    """The files that its hash covers: weights and, where they are there, the optimizer's state and config.json."""
    saved_as: Mapping[str, str] = field(repr=False)
    """Name of a tensor -> its name in the checkpoint."""

    @property
    def parameters(self) -> int:
        """The number of numbers in its tensors."""
        return sum(_product(shape) for shape, _ in self.tensors.values())

    @property
    def config(self) -> Path | None:
        """The config.json of a Hugging Face folder."""
        configs = [path for path in self.files if path.name == "config.json"]
        return configs[0] if configs else None

    @cached_property
    def sha256(self) -> str:
        """The hash of its only file, or of several files' names and hashes. It reads them all."""
        digests = {self._name(path): _sha256(path) for path in self.files}
        if len(digests) == 1:
            return next(iter(digests.values()))
        lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _name(self, file: Path) -> str:
        """Return the name of a file, with its folder's if it is not directly in the checkpoint: several may have a
        .metadata."""
        for root in (self.path, self.path.parent):
            if root in file.parents:
                return file.relative_to(root).as_posix()
        return file.name

    def check(self) -> None:
        """UserError with the first problem, and how many others there are."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more faults)" if len(self.problems) > 1 else ""
            raise UserError(f"{self.path}: {self.problems[0]}{more}")


def first_names(names: Iterable[str], count: int = 3) -> str:
    """ "a, b, c and 4 more", for the names."""
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def step_in_name(path: Path) -> int | None:
    """The step in the name of a path: 100 of "checkpoint-100", "step-100" or "step_100.pt"."""
    word, _, number = path.stem.replace("_", "-").rpartition("-")
    return int(number) if word in ("checkpoint", "step", "global-step", "iter") and number.isdecimal() else None


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
