"""The lock of a folder: an flock on a file in it, which the kernel releases however its holder dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunBusy(Exception):
    """Another process works in this run folder."""


@contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock `path`. Raises RunBusy when another process still holds it after `wait_s` seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise RunBusy(path.parent.name)
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _try_flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
