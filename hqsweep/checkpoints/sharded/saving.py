"""Saves in the background, and what becomes of one that failed: result() raises it, else the next save does, else it is
said when Python ends, which then has exit code 120, Python's own for an error in the clean-up.
"""

import atexit
import errno
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

PROBE = bytes(1 << 20)
"""What is written to learn what the disk refuses: more than a write that failed leaves free."""
WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is larger than the file system or `ulimit -f` allows",
    errno.EROFS: "the file system is read-only",
}


class Saving:
    """A checkpoint that is being written beside the training, from copies on the CPU."""

    def __init__(self, future: Future, folder: Path) -> None:
        self._future, self._folder = future, folder
        if not _OPEN:
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)  # the threads have ended when it is called
        _OPEN.append(self)

    def done(self) -> bool:
        """Whether this rank has nothing left to do."""
        return self._future.done()

    def result(self) -> Path:
        """The path of the checkpoint, once all ranks have written it; raises what a rank raised."""
        try:
            return self._future.result()
        finally:
            if self._future.done() and self in _OPEN:
                _OPEN.remove(self)

    def fault(self) -> str | None:
        """Why it failed, once it has ended, as a sentence; None where it did not."""
        error = self._future.exception()
        return None if error is None else f"save_sharded_async: '{self._folder}' was not saved: {words_of(error)}"


_OPEN: list[Saving] = []
"""Saves whose result() was not called."""


def settle() -> None:
    """Wait for the saves that are under way; raise RuntimeError for those that failed and were not asked for their
    result."""
    saves, faults = _OPEN[:], [fault for saving in _OPEN if (fault := saving.fault())]
    _OPEN[:] = [saving for saving in _OPEN if saving not in saves]
    if faults:
        raise RuntimeError("; ".join(faults))


def _at_exit() -> None:
    try:
        settle()
    except RuntimeError as error:
        print(f"hqsweep: {error}", file=sys.stderr, flush=True)
        sys.stderr = _Failing(sys.stderr)


class _Failing:
    """A stream that cannot be flushed, by which Python knows that the clean-up failed: other handlers are still called,
    as they would not be after os._exit()."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise OSError(errno.EIO, "a checkpoint was not saved")


def words_of(error: BaseException) -> str:
    """An error in one line, plain where the disk refused."""
    known = WORDS.get(error.errno) if isinstance(error, OSError) else None
    return known or " ".join(f"{type(error).__name__}: {error}".split())


def disk_fault(folder: Path) -> OSError | None:
    """What the disk refuses of a folder's largest file, if that grows; None where it takes it, and where there is no
    folder. torch's own message of a write that failed ("unexpected pos 704 vs 598") does not say."""
    if not folder.is_dir():
        return None
    files = [path for path in folder.rglob("*") if path.is_file()]
    try:
        with open(max(files, key=lambda path: path.stat().st_size, default=folder / "probe"), "ab") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return OSError(error.errno, WORDS.get(error.errno, error.strerror), str(folder).removesuffix(".partial"))
    return None
