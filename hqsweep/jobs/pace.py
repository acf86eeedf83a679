"""The pace of a training: a few steps of its own, timed in a process of their own, without rows or checkpoints.

A run of k at a time is timed by k processes that begin their timed steps together. Each does the steps as a run does:
the same model, data, recipe, kernels and graphs.
"""

import contextlib
import multiprocessing
import os
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import BrokenBarrierError
from typing import Any

import torch

from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.errors import UserError
from hqsweep.jobs.isolation import make_deterministic
from hqsweep.recipe.factories import Importer
from hqsweep.train import data
from hqsweep.train.build import pick_device
from hqsweep.train.loop import Trainer

WARM = {"cuda": 5, "cpu": 1}
"""Steps before the timed ones: two eager ones, a capture, and two replays; on the CPU one."""
TIMED = {"cuda": 10, "cpu": 2}
LIMIT_S = 600.0
"""The seconds after which a process that says nothing is given up."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of `together` equal trainings at a time. seconds: of a step of one of them; steps: how many were timed;
    start: the seconds before them, in which all is loaded and compiled; tokens_per_s: of all together; memory: bytes on
    the GPU that one takes at most, 0 on a CPU; device: its name."""

    together: int
    seconds: float
    steps: int
    start: float
    tokens_per_s: float
    memory: int
    device: str


def measure(config: Mapping[str, Any], *, together: int = 1, threads: int = 1, imports: Sequence[str] = ()) -> Pace:
    """The pace of a run's config. threads: CPU threads of each process; imports: the worker's arguments with the Python
    functions that it may import.

    Raises:
        UserError: the training cannot be built, or runs out of memory, with the reason.
    """
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(together), context.Queue()
    arguments = (dict(config), tuple(imports), threads, barrier, answers)
    processes = [context.Process(target=_timed, args=arguments, daemon=True) for _ in range(together)]
    for process in processes:
        process.start()
    try:
        found = [_answer(answers, processes) for _ in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    faults = [answer for answer in found if isinstance(answer, str)]
    if faults:
        raise UserError(f"no step could be timed: {faults[0]}")
    train = config["train"]
    seconds = sum(answer["seconds"] for answer in found) / together
    return Pace(
        together=together,
        seconds=seconds,
        steps=found[0]["steps"],
        start=max(answer["start"] for answer in found),
        tokens_per_s=together * train["batch"] * train["context"] / seconds,
        memory=max(answer["memory"] for answer in found),
        device=found[0]["device"],
    )


def _answer(answers: Any, processes: Sequence[Any]) -> Any:
    """The next answer of a process, or a sentence about one that died or is silent."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=0.5)
        dead = next((process for process in processes if process.exitcode not in (None, 0)), None)
        if dead is not None and answers.empty():
            return f"its process ended with code {dead.exitcode}"
    return f"it took more than {LIMIT_S:.0f} s"


def _timed(config: dict[str, Any], imports: Sequence[str], threads: int, barrier: Any, answers: Any) -> None:
    """Time the steps, and put the result, or the reason for none, into `answers`. Its output goes nowhere."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(threads)
    try:
        answers.put(_time(config, imports, barrier))
    except BrokenBarrierError:
        answers.put("another process of the same training failed")
    except Exception as error:
        barrier.abort()
        answers.put(" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _time(config: dict[str, Any], imports: Sequence[str], barrier: Any) -> dict[str, Any]:
    began = time.perf_counter()
    typed = parse(_shortened(config), find=_importer(imports))
    device = pick_device(typed.train.device)
    if device.type == "cuda":
        make_deterministic()
    trainer = Trainer(typed, data.loaded(typed.data), typed.recipe.build(), device)
    warm, timed = WARM[device.type], TIMED[device.type]
    for _ in trainer.steps(last=warm):
        pass
    _synchronize(device)
    start = time.perf_counter() - began
    barrier.wait(LIMIT_S)
    began = time.perf_counter()
    for _ in trainer.steps(last=warm + timed):
        pass
    _synchronize(device)
    seconds = (time.perf_counter() - began) / timed
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    memory = torch.cuda.max_memory_reserved(device) if on_gpu else 0
    return {"seconds": seconds, "steps": timed, "start": start, "memory": memory, "device": name}


def _shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a run from its first step, whose timed steps neither log nor evaluate nor sample."""
    enough = max(config["train"]["steps"], max(WARM.values()) + max(TIMED.values()) + 1)
    longer = dict.fromkeys(("steps", "log_every", "eval_every", "checkpoint_every"), enough)
    stats = {**config.get("stats", {}), "every": 0, "capture_at": None}
    return {**config, "fork": None, "stats": stats, "train": {**config["train"], **longer}}


def _importer(imports: Sequence[str]) -> Importer:
    folders = [word.removeprefix("--import-from=") for word in imports if word.startswith("--import-from=")]
    paths = [word.removeprefix("--import=") for word in imports if word.startswith("--import=")]
    return Importer(lambda line: None, folders, paths, refusal="which the command did not import")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def evaluations(config: ConvergenceConfig) -> float:
    """The forwards of a run's evaluations in units of a step, whose backward takes twice as long as its forward."""
    count = -(-config.own_steps // config.train.eval_every)
    return count * config.train.eval_batches / config.train.microbatches / 3
