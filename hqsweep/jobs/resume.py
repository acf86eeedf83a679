"""Where a run goes on: after its newest sound checkpoint, with the rows before it, or at its start.

Damaged files are reported and not used.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from hqsweep.config.job import ConvergenceConfig
from hqsweep.jobs.sink import Sink
from hqsweep.train.checkpoint import newest, step_of
from hqsweep.train.record import ANOTHER_RUN, OTHER_DATA, Record, discard, fault_of, read_record, write_record


def go_back(config: ConvergenceConfig, sink: Sink, workspace: Path, data: str) -> Path | None:
    """The newest sound checkpoint with all rows and operands from before it; None for a run that begins at its start.

    Rows after the checkpoint are dropped. Damaged files are reported and deleted. Sound states at a trunk's fork points
    stay, because forks may begin there while the trunk repeats its steps. data: the hash of the data that the run reads
    now.
    """
    folder = workspace / "checkpoint"
    for half in (*folder.glob("*.tmp"), *folder.glob("*.partial")):
        shutil.rmtree(half) if half.is_dir() and not half.is_symlink() else half.unlink()
    path, faults = newest(folder, partial(refusal, config, sink, workspace, data))
    sink.rewind(read_record(path).rows if path else {}, step_of(path) if path else -1)
    how = f"went on from {path.name}" if path else "began again from the start"
    for other, fault in faults.items():
        sink.repaired(f"{fault}; the run {how}")
        if step_of(other) not in config.points or fault_of(other, sink.run_id):
            discard(other)
    return path


def refusal(
    config: ConvergenceConfig, sink: Sink, workspace: Path, data: str, path: Path, record: Record
) -> str | None:
    """The reason not to go on from a sound checkpoint; None to go on. data: the hash of the data that the run reads
    now."""
    if record.run != sink.run_id:
        return ANOTHER_RUN
    if record.data not in ("", data):
        return OTHER_DATA
    captured = config.stats.capture_at is not None and config.stats.capture_at <= step_of(path)
    fault = fault_of(captured_file(config, workspace), sink.run_id) if captured else None
    return f"of the operands that were written before it, {fault}" if fault else sink.fits(record.rows)


def captured_file(config: ConvergenceConfig, workspace: Path) -> Path:
    """The file with the operands of the step stats.capture_at."""
    return workspace / "captured" / f"step_{config.stats.capture_at}.safetensors"


def save_captured(operands: Mapping[str, Tensor], path: Path, run: str) -> None:
    """Write the operands of a step, for `hqsweep probe`, and their record. The file is written whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    discard(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        save_file(operands, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    write_record(path, Record(file=path.name, sha256=digest, bytes=size, run=run))
