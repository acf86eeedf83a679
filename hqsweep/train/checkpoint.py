"""Checkpoints of a run: the file step_N.pt of one process, or the folder step_N of several ranks.

The file is the whole state of a Trainer; the folder has the layout of torch.distributed.checkpoint. Beside each stands
its record (record.py).
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import torch

from hqsweep.checkpoints.torch_file import Refused, load
from hqsweep.errors import Damaged
from hqsweep.host import Memory, sync_folder
from hqsweep.parallel.mesh import Ranks
from hqsweep.parallel.wire.collectives import by_first, gathered, rank_in, together
from hqsweep.train.record import (
    ANOTHER_FILE,
    Mark,
    NotAsWritten,
    Record,
    check_recorded,
    checkpoints,
    digest_of_files,
    digests_of,
    discard,
    read_recorded,
    write_record,
)


class Resumable(Protocol):
    """A Trainer, as a checkpoint knows it."""

    step: int
    device: torch.device
    kept: Any
    """The steps whose checkpoints are kept."""
    ranks: Ranks
    """The ranks that train; the first one writes records."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict:
        """The whole state of the training."""

    def load_state(self, state: dict) -> None:
        """Load this state."""

    def position(self) -> dict:
        """The part of state() beside model and optimizer, equal on all ranks."""

    def load_position(self, position: dict) -> None:
        """Load this position, after model and optimizer are loaded."""


Refusal = Callable[[Path, Record], str | None]
"""Gives the reason to pass over a sound checkpoint, as a part of a sentence; None to go on from it."""


class _Hashed:
    """A file to write to, which hashes and counts its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def save_checkpoint(
    trainer: Resumable, folder: Path, *, rows: Mapping[str, Mark] | None = None, run: str = "", data: str = ""
) -> None:
    """Write step_<n>.pt and its record, read it back, and then delete older checkpoints that no fork needs.

    The checkpoint before stays, so that at every instant one whole checkpoint has been read back as written. Several
    ranks call it together, and write the folder step_<n>.

    rows: the marks of the rows before it, which are on the disk. run: the id of the run. data: the hash of its data.
    Raises Damaged where other bytes are read than were written; all earlier checkpoints are still there then.
    """
    if trainer.ranks.size > 1:
        _save_folder(trainer, folder, _record(trainer, rows, run, data))
        return
    state = trainer.state()
    _save_file(_record(trainer, rows, run, data), folder, trainer.kept, lambda file: torch.save(state, file))


def _record(trainer: Resumable, rows: Mapping[str, Mark] | None, run: str, data: str) -> Record:
    """The record of a checkpoint before it is written."""
    known = {"run": run, "data": data, "rows": dict(rows or {}), "point": trainer.step in trainer.kept}
    return Record(file=f"step_{trainer.step}", sha256="", bytes=0, **known)


def _save_file(record: Record, folder: Path, kept: Any, write: Callable[[BinaryIO], object]) -> None:
    """Write one process's checkpoint and its record, read it back, and delete older ones but the steps `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{record.file}.pt"
    written = _write_state(write, target)
    record = replace(record, file=target.name, sha256=written.sha256.hexdigest(), bytes=written.bytes)
    try:
        write_record(target, record)
        _read_back(target)
    except OSError:
        discard(target)
        raise
    except NotAsWritten as error:
        discard(target)
        raise Damaged(target, f"read back, {error.fault}", "is the disk sound? The one before it is there") from None
    _drop_older(folder, step_of(target), kept)


PART = 16
"""The least number of times that a checkpoint must fit into the memory, to be written while the training goes on."""


class Saver:
    """Saves the checkpoints of a training. On a GPU the training goes on while a thread writes.

    The training waits until its state is in the host's memory, as the bytes of the file, and for the checkpoint before.
    It waits for the whole file where ranks save together, on a CPU, and where the file is larger than 1/PART of the
    memory that the machine or the control group allows. At the end of the block all files are on the disk. A failed
    write raises at the next save, or at the end of the block.
    """

    def __init__(self, trainer: Resumable, folder: Path, *, run: str, data: str) -> None:
        self._trainer, self._folder, self._known = trainer, folder, (run, data)
        self._writer, self._written = ThreadPoolExecutor(1, "checkpoint"), Future()
        self._written.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait for the last file. The error of the block goes before an error of the write."""
        self._writer.shutdown()
        if not kind:
            self._written.result()

    def save(self, rows: Mapping[str, Mark]) -> None:
        """Save the state of this step; as save_checkpoint."""
        self._written.result()
        trainer, (run, data) = self._trainer, self._known
        if not self._in_background():
            save_checkpoint(trainer, self._folder, rows=rows, run=run, data=data)
            return
        file = BytesIO()
        torch.save(trainer.state(), file)
        record = _record(trainer, rows, run, data)
        self._written = self._writer.submit(
            _save_file, record, self._folder, trainer.kept, lambda target: target.write(file.getbuffer())
        )

    def _in_background(self) -> bool:
        trainer = self._trainer
        if trainer.ranks.size > 1 or trainer.device.type != "cuda":
            return False
        state = 3 * sum(weight.nbytes for weight in trainer.model.parameters())  # with two moments
        limit = Memory().limit()
        return limit is not None and state * PART < limit[1]


def _save_folder(trainer: Resumable, folder: Path, record: Record) -> None:
    """Write this rank's part, read it back, and give the other ranks the hash of the bytes read."""
    from hqsweep.checkpoints.sharded_save import save_sharded  # slow to import, because of torch

    target = folder / record.file
    by_first(lambda: discard(target))
    save_sharded(trainer.model, trainer.optimizer, target, trainer.position())
    own = together(lambda: digests_of(_files_of(target, rank_in())))
    sha256, size = digest_of_files({name: digest for part in gathered(own) for name, digest in part.items()})
    by_first(lambda: write_record(target, replace(record, sha256=sha256, bytes=size)))
    by_first(lambda: _drop_older(folder, trainer.step, trainer.kept))


def _files_of(folder: Path, rank: int) -> list[Path]:
    """The files of a folder that a rank has written. The first rank wrote all files without a rank in their names."""
    ranks = {path: re.match(r"__(\d+)_", path.name) for path in folder.iterdir()}
    return [path for path, match in ranks.items() if (int(match[1]) if match else 0) == rank]


def _drop_older(folder: Path, step: int, kept: Any) -> None:
    older = [path for at, path in checkpoints(folder).items() if at < step]
    for path in older[:-1]:
        if step_of(path) not in kept:
            discard(path)


def _write_state(write: Callable[[BinaryIO], object], target: Path) -> _Hashed:
    partial = target.with_suffix(".tmp")
    try:
        with partial.open("wb") as file:
            written = _Hashed(file)
            write(written)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except RuntimeError as error:  # torch raises it when a write fails
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    finally:
        partial.unlink(missing_ok=True)  # on a full disk it would take room from the checkpoints
    sync_folder(target.parent)
    return written


def _read_back(path: Path) -> None:
    """Compare a file with its record. The system is asked to drop its cache first, so that the disk is read."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_recorded(path, file)


def step_of(path: Path) -> int:
    """The N of step_N.pt or step_N."""
    return int(path.stem.removeprefix("step_"))


def newest(folder: Path, refusal: Refusal, before: int | None = None) -> tuple[Path | None, dict[Path, str]]:
    """(path, faults): the newest sound checkpoint that is not refused, or None; and path -> fault of each newer one.

    before: only checkpoints of earlier steps count. A fault is a sentence without its end.
    """
    faults: dict[Path, str] = {}
    for step, path in reversed(checkpoints(folder).items()):
        if before is not None and step >= before:
            continue
        try:
            refused = refusal(path, check_recorded(path))
        except NotAsWritten as error:
            faults[path] = str(error)
            continue
        if refused is None:
            return path, faults
        faults[path] = str(NotAsWritten(path, refused))
    return None, faults


def load_checkpoint(trainer: Resumable, folder: Path, before: int | None = None) -> bool:
    """Continue from the newest sound checkpoint, or the newest before a step. False if there is none."""
    path, _ = newest(folder, lambda path, record: None, before)
    if path is not None:
        go_on_from(trainer, path)
    return path is not None


def go_on_from(trainer: Resumable, path: Path) -> None:
    """Continue from a checkpoint; from a folder, with any number of ranks together.

    Raises NotAsWritten for a damaged file. A folder must have been compared with its record before.
    """
    if path.is_dir():
        from hqsweep.checkpoints.sharded_load import load_sharded

        trainer.load_position(load_sharded(trainer.model, trainer.optimizer, path))
    else:
        trainer.load_state(read_state(path, trainer.device))


def read_state(path: Path, device: torch.device, sha256: str | None = None) -> dict:
    """The state in a file of save_checkpoint, on the device. Raises NotAsWritten for any other file.

    sha256: the hash to compare with, instead of the record's.
    """
    with path.open("rb") as file:
        if sha256 is None:
            read_recorded(path, file)
        elif hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise NotAsWritten(path, ANOTHER_FILE)
        file.seek(0)
        try:
            return load(file, device=device)
        except Refused as refused:
            raise NotAsWritten(path, f"it is no checkpoint ({refused})") from None
