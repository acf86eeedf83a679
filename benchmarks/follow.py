"""Follows the runs of an `hqsweep run` by what their status says, as its display does."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Seen = Callable[[str, dict, float], None]
"""Called with the name of a run, its status, and when that was written, in seconds after the command was given."""


def follow(conf: str, overrides: Sequence[str], folder: Path, seen: Seen, poll_s: float) -> float:
    """Seconds of a sweep whose runs go to `folder`; CalledProcessError when one fails. `seen` gets each run's status
    every poll_s seconds."""
    command = [sys.executable, "-m", "hqsweep", "run", f"conf={conf}", f"runs_dir={folder}", *overrides]
    start, offset = time.perf_counter(), time.time()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for path in folder.glob("*/*/status.json"):
                seen(path.parent.name, json.loads(path.read_text()), path.stat().st_mtime - offset)
            time.sleep(poll_s)
        whole = time.perf_counter() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return whole
