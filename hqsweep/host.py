"""Services of the machine for every room: CPUs, memory, files that are written as a whole, and locks.

A lock is an flock on a file, which the kernel releases however its holder dies. A holder that is stopped (SIGSTOP,
Ctrl-Z) or hangs keeps it, so whoever waits gets its process id and its command line.

Locks are written by hand: filelock cannot say whether a lock is held without taking it, nor that the lock's file was
deleted under its holder, nor which process holds it.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hqsweep.errors import Damaged

NAMED_S = 5.0
"""The seconds of waiting after which the holder of a lock is named."""
STOPPED = "which is stopped"

CACHE = "HQSWEEP_CACHE"
"""The environment variable that names cache_folder()."""


def cache_folder() -> Path:
    """The user's cache: $HQSWEEP_CACHE, or hqsweep in $XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    if named := os.environ.get(CACHE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hqsweep"


def usable_cpus() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_whole(path: Path, data: bytes, *, synced: bool = False) -> None:
    """Replace the file `path` by `data` atomically: a reader sees the old file or the new one.

    synced: return when the data is on the disk, so that a power cut loses nothing. The temporary file carries the
    process id, so that two writers do not share it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


UNLIMITED = 2**60
"""The bound above which cgroup v1's limits mean no limit."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that this process and its children may have, by the machine and their control groups (v2 or v1).

    root: where /proc and /sys are.
    """

    root: Path = Path("/")

    def kills(self) -> int:
        """The number of processes that the kernel has killed for memory so far, on the machine and in our control
        groups."""
        counts = [_field(group / file, "oom_kill") for group, file in self._groups()]
        return sum(counts) + _field(self.root / "proc/vmstat", "oom_kill")

    def limit(self) -> tuple[str, int] | None:
        """(owner, bytes) of the smallest limit on us; None where nothing is known."""
        limits = [("the machine", _field(self.root / "proc/meminfo", "MemTotal:") * 1024)]
        for group, _ in self._groups():
            for name in ("memory.max", "memory.limit_in_bytes"):
                limits.append(("its control group", _number(group / name)))
        known = [(whose, size) for whose, size in limits if 0 < size < UNLIMITED]
        return min(known, key=lambda entry: entry[1], default=None)

    def _groups(self) -> Iterator[tuple[Path, str]]:
        """(folder, name of the file with its counts) of our control groups for memory, each with those above it."""
        with suppress(OSError):
            for line in (self.root / "proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if not controllers:
                    yield from _upwards(self.root / "sys/fs/cgroup", path, "memory.events")
                elif "memory" in controllers.split(","):
                    yield from _upwards(self.root / "sys/fs/cgroup/memory", path, "memory.oom_control")


def _upwards(mount: Path, path: str, counts: str) -> Iterator[tuple[Path, str]]:
    """A group and those above it, as far as they are visible here: in a container its own group is the mount."""
    group = mount / path.strip("/")
    while group != mount:
        if group.is_dir():
            yield group, counts
        group = group.parent
    if mount.is_dir():
        yield mount, counts


def _field(path: Path, name: str) -> int:
    """The number after a name in a file of lines "name number"; 0 where it is missing."""
    with suppress(OSError, ValueError, IndexError):
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) for words in lines if words and words[0] == name), 0)
    return 0


def _number(path: Path) -> int:
    """The number in a file; 0 where it holds none, such as "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


class Busy(Exception):
    """Another process holds the lock of this folder."""


@contextmanager
def locked(
    path: Path, wait_s: float = 0.0, say: Callable[[str], None] = lambda line: None
) -> Iterator[Callable[[], bool]]:
    """Hold the lock `path`, and yield a function that returns whether it is still held.

    A process that deletes the folder deletes the lock, and another process may hold a new one there. `say` gets a line
    on the holder after NAMED_S seconds.

    Raises Busy when another process still holds it after `wait_s` seconds, or after NAMED_S if that process is stopped,
    and Damaged for a folder with content in the place of the lock; a link or an empty folder there is deleted.
    """
    descriptor = _open(path)
    try:
        began, named = time.monotonic(), False
        while not _try_flock(descriptor, fcntl.LOCK_EX):
            waited_s = time.monotonic() - began
            if waited_s >= NAMED_S and not named:
                named = True
                say(sentence := holder(path))
                wait_s = 0.0 if STOPPED in sentence else wait_s
            if waited_s >= wait_s:
                raise Busy(path.parent.name)
            time.sleep(0.02)
        yield lambda: _is_at(descriptor, path)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not _try_flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def holder(path: Path) -> str:
    """Return a sentence with the process that holds the lock `path`, and a remedy."""
    pid = holder_pid(path)
    if pid is None:
        return f"{path} is held by a process that cannot be seen from here, on another machine or in another container"
    who = f"{path} is held by process {pid} ({command_of(pid)})"
    if is_stopped(pid):
        return f"{who}, {STOPPED}: `kill -CONT {pid}` lets it go on, `kill -KILL {pid}` ends it and frees the lock"
    return f"{who}; `kill {pid}` ends it, where it hangs"


def holder_pid(path: Path) -> int | None:
    """The process id of the holder of the lock `path`; None for a free lock, or where the kernel does not say."""
    try:
        inode, lines = os.stat(path).st_ino, Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if "FLOCK" in words and len(words) >= 6 and words[-3].rpartition(":")[2] == str(inode):
            pid = int(words[-4])
            if pid > 0 and pid != os.getpid():
                return pid
    return None


def command_of(pid: int) -> str:
    """The command line of a process, shortened."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "command unknown"
    text = "".join(character if character.isprintable() else "?" for character in " ".join(words).strip())
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, so that it does nothing until SIGCONT."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def stopped_among(pid: int) -> int | None:
    """Return the first stopped process among a process and its descendants, such as the ranks of a run."""
    if is_stopped(pid):
        return pid
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                if stopped := stopped_among(int(child)):
                    return stopped
    return None


def _open(path: Path) -> int:
    """The lock's file, created where it is missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP):
            raise
    try:
        path.unlink() if path.is_symlink() else path.rmdir()
    except OSError as error:
        raise Damaged(path, f"is a folder, where a lock belongs ({error.strerror})", "delete it") from None
    return os.open(path, flags, 0o644)


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
