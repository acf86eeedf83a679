"""The folder of one run: every path in it, what stands there, and whose it is.

A folder belongs to one process at a time, by an flock on it, which the kernel releases however the worker dies.
"""

import shutil
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hqsweep.errors import UserError
from hqsweep.sweep import seal
from hqsweep.sweep.files import encode_json, read_json, read_rows, write_bytes, write_json
from hqsweep.sweep.locks import is_locked, locked
from hqsweep.sweep.names import fork_of

PENDING: dict[str, Any] = {
    "state": "pending", "reason": None, "exit_code": None, "pid": None, "host": None, "attempt": 0,
    "started": None, "ended": None, "seconds": 0.0, "progress": None,
}  # fmt: skip
"""status.json of a run that was never started. `started` and `ended` of the last attempt are in seconds since 1970,
`seconds` is the time of all attempts together, `progress` is {"step", "steps", "loss", "tokens_per_s", "eta_s"}."""

YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CANCELLED = "cancelled"
"""Reason of a run that `hqsweep cancel` took back."""


@dataclass(frozen=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sweep_path(self) -> Path:
        return self.path.parent

    @property
    def sweep(self) -> str:
        return self.path.parent.name

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def lock_path(self) -> Path:
        return self.path / ".lock"

    @property
    def job_path(self) -> Path:
        """The scheduler's job that has the run, as {"id": "12_3"}; no file where there is none."""
        return self.path / "job.json"

    def jsonl(self, table: str) -> Path:
        """Where the rows of `table` ("metrics", "stats" or "parity") are appended."""
        return self.path / f"{table}.jsonl"

    def parquet(self, table: str) -> Path:
        """Where the rows of `table` are when the run is finished."""
        return self.path / f"{table}.parquet"

    def fork(self) -> Any:
        """The section fork of the config, a ForkConfig; None for a run from scratch to its end."""
        return fork_of(self.config())

    def trunk_state(self) -> Path | None:
        """The file that a fork starts from, whether it is there yet or not; None for all other runs."""
        fork = self.fork()
        return fork and fork.state_file(self.path)

    def trunk(self) -> "RunDir | None":
        """The run of this sweep that the run is a fork of; None for all other runs."""
        fork = self.fork()
        outside = fork is None or fork.is_trunk or fork.trunk_hash is not None
        return None if outside else RunDir(self.sweep_path / fork.trunk)

    def config(self) -> dict[str, Any]:
        """The resolved config. Raises UserError where there is none."""
        try:
            return yaml.load(self.config_path.read_text(), Loader=YAML)  # as yaml.safe_load, ten times as fast
        except FileNotFoundError:
            raise UserError(f"{self.path}: no config.yaml there, so this is not the folder of a run") from None

    def manifest(self) -> dict[str, Any]:
        return read_json(self.manifest_path, {})

    def update_manifest(self, **facts: Any) -> None:
        write_json(self.manifest_path, self.manifest() | facts)

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Rows of `table` as written so far, a torn last line dropped."""
        return read_rows(self.jsonl(table))

    def written_status(self) -> dict[str, Any]:
        """status.json as it stands, PENDING without one."""
        return PENDING | read_json(self.status_path, {})

    def status(self) -> dict[str, Any]:
        """written_status, but a run whose worker died on this machine without a word is interrupted, not running."""
        status = self.written_status()
        if status["state"] != "running" or status["host"] != socket.gethostname() or self.is_locked():
            return status
        status = self.written_status()  # again: it may have ended between the first look and the lock
        if status["state"] == "running":
            status |= {"state": "interrupted", "reason": "its worker is gone"}
        return status

    def has_finished(self) -> bool:
        return self.written_status()["state"] == "finished"

    def write_status(self, **changes: Any) -> dict[str, Any]:
        """Change these fields of status.json and return all. The worker writes it, and the engine once that is dead.

        A status with which a run ends (seal.SEALED) seals all that the run has put out; one with which it goes on, or
        starts again, takes the seal away."""
        status = self.written_status() | changes
        data = encode_json(status)
        if "state" in changes and status["state"] in seal.SEALED:
            seal.write(self.path, data)
        write_bytes(self.status_path, data)
        if status["state"] not in seal.SEALED:
            seal.remove(self.path)
        return status

    def lock(self, wait_s: float = 0.0) -> AbstractContextManager[None]:
        """Hold the folder. Raises RunBusy when another process still holds it after `wait_s` seconds."""
        return locked(self.lock_path, wait_s)

    def is_locked(self) -> bool:
        """Whether a live process holds the folder."""
        return is_locked(self.lock_path)

    def reset(self) -> None:
        """Delete what the run has put out, so that it is pending again, which its status says first. The caller holds
        the lock."""
        manifest = self.manifest()
        write_json(self.status_path, PENDING)
        seal.remove(self.path)
        for entry in self.path.iterdir():
            if entry not in (self.config_path, self.lock_path, self.status_path):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        planned = ("run_id", "sweep", "arm", "seed", "job", "overrides", "trunk", "point")
        write_json(self.manifest_path, {key: manifest[key] for key in planned if key in manifest})
