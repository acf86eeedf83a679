"""Checkpoint: what is known of a checkpoint before any of its tensors is read. Nothing here imports torch."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hqsweep.errors import UserError
from hqsweep.memo import cached_property

Kind = Literal["safetensors", "torch", "dcp", "hqsweep"]
Optimizer = Literal["none", "named", "indexed"]
Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Name of a tensor -> its shape, and its dtype as torch names it, such as "bfloat16"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checkpoint as its files describe it; no tensor was read.

    kind: "safetensors" (a Hugging Face folder, or a file), "torch" (a file of torch.save), "dcp" (a folder of
    torch.distributed.checkpoint, such as torchtitan's), "hqsweep" (step_N.pt of a run). tensors: those of the model, by
    their names without what wrappers added. optimizer: whether moments are there, and whether by names or by indices.
    problems: why it cannot be loaded, one sentence each; notes: what of it is not read.
    """

    path: Path
    kind: Kind
    step: int | None
    tensors: Tensors
    optimizer: Optimizer = "none"
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    moments: tuple[Path, ...] = ()
    """Where the optimizer's state is, if beside the weights: a file of torch.save, a folder of
    torch.distributed.checkpoint, or the files of DeepSpeed's ranks in their order."""
    weights: tuple[Path, ...] = ()
    """The files of torch.save in a folder that hold them; empty where path is the one, or they are of another kind."""
    files: tuple[Path, ...] = field(repr=False)
    """What its hash is of: weights and, where they are there, the optimizer's state and config.json."""
    saved_as: Mapping[str, str] = field(repr=False)
    """Name of a tensor -> how the checkpoint calls it."""

    @property
    def parameters(self) -> int:
        """How many numbers its tensors hold."""
        return sum(_product(shape) for shape, _ in self.tensors.values())

    @property
    def config(self) -> Path | None:
        """The config.json of a Hugging Face folder."""
        found = [path for path in self.files if path.name == "config.json"]
        return found[0] if found else None

    @cached_property
    def sha256(self) -> str:
        """The hash of its files: of one file its own, of several that of their names and hashes. Reads them all."""
        digests = {self._name(path): _sha256(path) for path in self.files}
        if len(digests) == 1:
            return next(iter(digests.values()))
        lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _name(self, file: Path) -> str:
        """Of a file in a folder within it, or beside it, the folder's name too, as several may have a .metadata."""
        for root in (self.path, self.path.parent):
            if root in file.parents:
                return file.relative_to(root).as_posix()
        return file.name

    def check(self) -> None:
        """UserError with its first problem, and how many more there are."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more faults)" if len(self.problems) > 1 else ""
            raise UserError(f"{self.path}: {self.problems[0]}{more}")


def first_names(names: Iterable[str], count: int = 3) -> str:
    """ "a, b, c and 4 more"."""
    names = list(names)
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def step_in_name(path: Path) -> int | None:
    """100 of "checkpoint-100", "step-100" or "step_100.pt"."""
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
