"""Many small runs on one GPU: one after the other against several at a time, through the command line.

    python -m benchmarks.sharing [--runs 24] [--workers 12]

wall  seconds of a whole sweep of tiny runs, start to last row, with engine.workers=1 and with more. A run is a process,
which spends most of its time starting Python, torch and CUDA and launching small kernels, so that it leaves the GPU
idle; processes share it by time slices (or MPS, where the machine runs it).

Floors: with W workers on C cores a sweep takes at least 1/min(W, C) of the sequential time; and at least what the
kernels of all runs take, one after the other.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import rows

SECTIONS = ("wall",)
COLUMNS = ("section", "case", "runs", "cores", "seconds", "seconds_per_run", "share_of_sequential")
TINY = {
    "null_arm": "false", "recipe": "mxfp8", "model.dim": "128", "model.heads": "4", "train.batch": "16",
    "train.context": "128", "train.steps": "200", "train.eval_every": "100", "stats.every": "0", "track": "none",
}  # fmt: skip


def sweep_seconds(runs: int, workers: int, **overrides: str) -> float:
    """Wall time of `runs` seeds of conf=markov; CalledProcessError when one fails. overrides: over TINY's."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"seed": f"range({runs})", "engine.workers": str(workers), "runs_dir": folder}
        words = [f"{key}={value}" for key, value in (TINY | keys | overrides).items()]
        start = time.perf_counter()
        command = [sys.executable, "-m", "hqsweep", "run", "conf=markov", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--workers", type=int, default=12)
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    writer, sequential = rows.Writer("sharing", "cuda", args), None
    for workers in (1, args.workers):
        seconds = sweep_seconds(args.runs, workers, **{"train.device": "cuda"})
        sequential = sequential or seconds
        row = {"runs": args.runs, "cores": os.cpu_count(), "seconds": seconds, "seconds_per_run": seconds / args.runs}
        writer.add(
            {"section": "wall", "case": f"workers={workers}"} | row | {"share_of_sequential": seconds / sequential}
        )
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
