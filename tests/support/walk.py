"""How far a reader walks through the package to follow one call: the functions of hqsweep that run, and their files."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hqsweep

PACKAGE = str(Path(hqsweep.__file__).parent) + os.sep


class Walk(NamedTuple):
    """What a traced call runs of the package, generators and comprehensions included."""

    calls: int
    functions: int
    files: int
    changes: int
    """Calls into another file than the calling function of the package stands in."""


def walk(call: Callable[[], Any]) -> Walk:
    """Trace one call, in this thread and without its effects on others."""
    stack: list[str] = []
    functions: set[tuple[str, str]] = set()
    calls = changes = 0

    def trace(frame: Any, event: str, _: Any) -> None:
        nonlocal calls, changes
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return
        if event == "call":
            calls += 1
            changes += bool(stack) and stack[-1] != file
            functions.add((file, frame.f_code.co_qualname))
            stack.append(file)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(calls, len(functions), len({file for file, _ in functions}), changes)


def held_weight(rank: int) -> Walk:
    """A held weight from its module to the first gather by torch's fully_shard, on each of several ranks."""
    from torch.distributed.fsdp import fully_shard

    def call() -> None:
        with hqsweep.nn.quantized_model_init():
            linear = hqsweep.nn.Linear(128, 128, name="fc", recipe=hqsweep.recipe("mxfp8"))
        fully_shard(linear)
        linear(torch.ones(32, 128))

    torch.manual_seed(0)
    call()  # whatever is done once in a process
    return walk(call)
