"""Why a run failed, in one line for its status: what was asked of the memory and what there was, what to change."""

import re

from hqsweep.errors import UserError
from hqsweep.jobs.sink import Diverged
from hqsweep.sweep.engine.memory import ADVICE, GIB


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
