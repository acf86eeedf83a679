"""The time from the command to the first step, and the share of each part of a run's start.

    python -m benchmarks.startup [--runs 2] [--device cuda] [--recipe mxfp8] [KEY=VALUE ...]

start  seconds from `hqsweep run` until a worker has the run (command_s), until its data are read (data_s), the model is
       built (model_s) and the first step is done (first_step_s), and their sum, as its status says them; then until the
       command ends (whole_s). The first run of a machine is cold: it compiles what Python has not compiled yet, and
       reads all from disk. The others come after it. KEY=VALUE: over those of conf=gpu_study with three steps.

Floor: importing torch and starting CUDA, which a process that does nothing else needs (torch_s), measured after each
run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import rows
from benchmarks.follow import follow

SECTIONS = ("start",)
PARTS = {"loading data": "command_s", "building the model": "data_s", "first step": "model_s", None: "first_step_s"}
"""The phase in a run's status -> the part that has ended when it begins; None: a step is done."""
COLUMNS = ("section", "case", "recipe", *PARTS.values(), "seconds", "whole_s", "torch_s")
SHORT = {
    "null_arm": "false", "seed": "0", "train.steps": "3", "train.eval_every": "3", "train.eval_batches": "1",
    "stats.every": "0", "track": "none", "engine.workers": "1",
}  # fmt: skip
POLL_S = 0.005
TORCH = "import torch; torch.zeros(1, device='{device}')"


def seconds_to_first_step(folder: Path, overrides: Sequence[str]) -> rows.Row:
    """Start the one run of a sweep, and wait for its end; CalledProcessError when it fails."""
    reached: dict[str | None, float] = {}
    whole = follow("gpu_study", overrides, folder, lambda _, status, at: note(status, reached, at), POLL_S)
    return parts(reached) | {"whole_s": whole}


def note(status: dict, reached: dict[str | None, float], at: float) -> None:
    """Note when each phase was first seen. Before the first one and after the last, the status has none."""
    phase = status.get("phase")
    if phase in PARTS and (phase is not None or "first step" in reached):
        reached.setdefault(phase, at)


def parts(reached: dict[str | None, float]) -> rows.Row:
    """The seconds of each part; a phase that was too short to be seen took none."""
    row, before = {}, 0.0
    for phase, name in PARTS.items():
        at = reached.get(phase, before)
        row[name], before = at - before, at
    return row | {"seconds": before}


def torch_seconds(device: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", TORCH.format(device=device)], check=True)
    return time.perf_counter() - start


def measure(overrides: Sequence[str], device: str) -> rows.Row:
    with tempfile.TemporaryDirectory() as folder:
        row = seconds_to_first_step(Path(folder), overrides)
    return row | {"torch_s": torch_seconds(device)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--recipe", default="mxfp8")
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args(arguments)
    writer = rows.Writer("startup", args.device, args)
    keys = SHORT | {"recipe": args.recipe, "train.device": args.device}
    overrides = [f"{key}={value}" for key, value in keys.items()] + args.overrides
    for run in range(args.runs):
        named = {"section": "start", "case": "warm" if run else "cold", "recipe": args.recipe}
        writer.attempt(named, partial(measure, overrides, args.device))
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
