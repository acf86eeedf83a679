"""Many small runs on one GPU: one after the other against several at a time, through the command line.

    python -m benchmarks.sharing [--only wall speed] [--runs 24] [--workers 12] [--together 8] [--recipes mxfp8]

wall   seconds of a whole sweep of tiny runs, start to last row, with engine.workers=1 and with more. A run is a
       process, which spends most of its time starting Python, torch and CUDA and launching small kernels, so that it
       leaves the GPU idle; processes share it by time slices (or MPS, where the machine runs it).
speed  tokens a second of runs of the model of conf=gpu_study (6 layers of width 384, 128 x 256 tokens), alone and
       several at a time, all of them together, while all train

Floors: with W workers on C cores a sweep takes at least 1/min(W, C) of the sequential time; and at least what the
kernels of all runs take, one after the other. Runs together are as fast as the device is busy with one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks import rows
from benchmarks.follow import follow

SECTIONS = ("wall", "speed")
COLUMNS = (
    "section", "case", "recipe", "runs", "cores", "seconds", "seconds_per_run", "share_of_sequential", "ktokens_s",
    "times_alone", "goal", "pass",
)  # fmt: skip
GOAL = 2.0
"""The speed that is wanted of 8 runs at a time, over that of one."""
STUDY = {
    "null_arm": "false", "train.eval_every": "100000", "train.eval_batches": "1", "train.log_every": "50",
    "train.checkpoint_every": "100000", "stats.every": "0", "track": "none",
}  # fmt: skip
STUDY_TOKENS = 128 * 256
WARM_STEPS = 50
POLL_S = 0.2
TINY = {
    "null_arm": "false", "recipe": "mxfp8", "model.dim": "128", "model.heads": "4", "train.batch": "16",
    "train.context": "128", "train.steps": "200", "train.eval_every": "100", "stats.every": "0", "track": "none",
}  # fmt: skip


def sweep_seconds(runs: int, workers: int, **overrides: str) -> float:
    """The wall time of `runs` seeds of conf=markov; CalledProcessError when one fails. overrides: over TINY's."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"seed": f"range({runs})", "engine.workers": str(workers), "runs_dir": folder}
        words = [f"{key}={value}" for key, value in (TINY | keys | overrides).items()]
        start = time.perf_counter()
        command = [sys.executable, "-m", "hqsweep", "run", "conf=markov", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


Samples = dict[str, list[tuple[float, int]]]
"""Run -> (seconds, steps done) as its status reports them, in order."""


def study_samples(runs: int, recipe: str, steps: int, **overrides: str) -> Samples:
    """The samples of `runs` seeds of conf=gpu_study, all at a time, from their statuses. overrides: over STUDY's."""
    samples: Samples = defaultdict(list)

    def seen(name: str, status: dict, at: float) -> None:
        progress = status.get("progress")
        if progress and (not samples[name] or samples[name][-1][1] < progress["step"]):
            samples[name].append((at, progress["step"]))

    with tempfile.TemporaryDirectory() as folder:
        keys = {"seed": f"range({runs})", "engine.workers": str(runs), "train.steps": str(steps), "recipe": recipe}
        words = [f"{key}={value}" for key, value in (STUDY | keys | overrides).items()]
        follow("gpu_study", words, Path(folder), seen, POLL_S)
    return samples


def steps_a_second(samples: Samples, steps: int, warm: int = WARM_STEPS) -> float:
    """The steps a second of all runs together, from when all are warm until the first is done. RuntimeError where that
    was never so."""
    warmed = [[(at, step) for at, step in of_run if step >= warm] for of_run in samples.values()]
    start = max((of_run[0][0] for of_run in warmed if of_run), default=0.0)
    end = min((at for of_run in warmed for at, step in of_run if step == steps), default=float("inf"))
    inside = [[sample for sample in of_run if start <= sample[0] <= end] for of_run in warmed]
    if not inside or any(len(of_run) < 2 for of_run in inside):
        raise RuntimeError("the runs did not train at the same time for long enough; give more --steps")
    return sum((run[-1][1] - run[0][1]) / (run[-1][0] - run[0][0]) for run in inside)


def wall(args: argparse.Namespace, writer: rows.Writer) -> None:
    """Measure the seconds of whole sweeps."""
    sequential = None
    for workers in (1, args.workers):
        seconds = sweep_seconds(args.runs, workers, **{"train.device": "cuda"})
        sequential = sequential or seconds
        row = {"runs": args.runs, "cores": os.cpu_count(), "seconds": seconds, "seconds_per_run": seconds / args.runs}
        writer.add(
            {"section": "wall", "case": f"workers={workers}"} | row | {"share_of_sequential": seconds / sequential}
        )


def speed(args: argparse.Namespace, writer: rows.Writer, recipe: str) -> None:
    """Measure the tokens a second, alone and together."""
    alone = None
    for runs in (1, args.together):
        seconds = 1 / steps_a_second(study_samples(runs, recipe, args.steps, **{"train.device": "cuda"}), args.steps)
        alone = alone or seconds
        row = {"runs": runs, "cores": os.cpu_count(), "ktokens_s": STUDY_TOKENS / seconds * 1e-3}
        row |= {"times_alone": alone / seconds}
        judged = {"goal": GOAL, "pass": alone / seconds >= GOAL} if runs > 1 else {}
        writer.add({"section": "speed", "case": f"runs={runs}", "recipe": recipe} | row | judged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--recipes", nargs="+", default=["mxfp8"])
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    writer = rows.Writer("sharing", "cuda", args)
    if "wall" in args.only:
        wall(args, writer)
    if "speed" in args.only:
        for recipe in args.recipes:
            speed(args, writer, recipe)
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
