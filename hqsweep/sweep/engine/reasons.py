"""Why a run failed, in one line for its status: an error's message, memory that ran out, or a kill for memory.

A killed process cannot read how much memory there was. Its parent does, by the counts of the process's control group
(cgroup v2 or v1) and of the machine.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hqsweep.errors import UserError
from hqsweep.jobs.sink import Diverged


class RankFailed(Exception):
    """A rank of a run has ended early; the message says which and why. is_cause: not because it had lost another."""

    def __init__(self, message: str, *, is_cause: bool = True) -> None:
        super().__init__(message)
        self.is_cause = is_cause


ON_GPU = re.compile(
    r"Tried to allocate ([\d.]+ \w+)\. (GPU \d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"
)
"""The messages of torch's CUDA allocator, since 2.2."""
ON_CPU = re.compile(r"you tried to allocate (\d+) bytes|Unable to allocate ([\d.]+ \w+)")
"""The messages of torch's CPU allocator, and of numpy."""


def reason_of(error: Exception) -> str:
    """The message of an error that is meant for people, what is known of memory that ran out, and of any other error
    its type and its message."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError | Diverged | RankFailed):
        return message
    if gpu := ON_GPU.search(message):
        asked, which, total, free = gpu.groups()
        return f"out of memory: {asked} were asked of {which}, where {free} of {total} were free; {_on_gpu()}"
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of GPU memory: {message}; {_on_gpu()}"
    cpu = ON_CPU.search(message)
    if cpu or isinstance(error, MemoryError):
        asked = "" if cpu is None else f": {cpu[2] or f'{int(cpu[1]) / GIB:.1f} GiB'} were asked for at once"
        return f"out of memory{asked}; {ADVICE}"
    return f"{type(error).__name__}: {message}"


def _on_gpu() -> str:
    return ADVICE.replace("engine.workers", "engine.runs_per_gpu")


GIB = 2**30
ADVICE = "give fewer engine.workers, more train.microbatches, or a smaller train.batch or model"
UNLIMITED = 2**60
"""The bound above which cgroup v1's limits mean no limit."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that this process and its children may have, as /proc and /sys are at `root`."""

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


def killed_for_memory(memory: Memory, killed_before: int, peak_bytes: int | None) -> str | None:
    """Why a process that SIGKILL ended was killed, if that was for memory: there were kills since `killed_before`.

    peak_bytes: the most that it had resident, where that is known."""
    if memory.kills() <= killed_before:
        return None
    limit = memory.limit()
    there = f"{limit[0]} has {limit[1] / GIB:.1f} GiB" if limit else "its limit is unknown"
    own = "" if peak_bytes is None else f", the run's process had {peak_bytes / GIB:.1f} GiB"
    return f"killed for memory: {there}{own}; {ADVICE}"


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
