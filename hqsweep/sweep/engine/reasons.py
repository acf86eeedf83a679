"""Why a run failed, in one line for its status: an error's message, memory that ran out, or a kill for memory.

A killed process cannot read how much memory there was. Its parent does.
"""

import re

from hqsweep.errors import UserError
from hqsweep.host import Memory
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
    """One line: the message of an error for people, the known facts where memory ran out, else type and message."""
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


def killed_for_memory(memory: Memory, killed_before: int, peak_bytes: int | None) -> str | None:
    """The reason of a SIGKILL, if the kernel has killed for memory since `killed_before`; None otherwise.

    peak_bytes: the largest resident size of the process, where it is known."""
    if memory.kills() <= killed_before:
        return None
    limit = memory.limit()
    there = f"{limit[0]} has {limit[1] / GIB:.1f} GiB" if limit else "its limit is unknown"
    own = "" if peak_bytes is None else f", the run's process had {peak_bytes / GIB:.1f} GiB"
    return f"killed for memory: {there}{own}; {ADVICE}"
