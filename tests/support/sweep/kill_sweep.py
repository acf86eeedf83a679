"""kill -9 of a sweep's worker, its parent or both, at random moments, until every run has finished.

`python tests/support/sweep/kill_sweep.py FOLDER --kills 50` runs sweeps of six trainings (with --forks: of a trunk for
each of two seeds and eight forks) in FOLDER until so many kills were dealt, compares each with the same sweep left in
peace, prints one line a kill, and exits 1 at the first difference.
`... FOLDER` without --kills is the parent: the local engine on the sweep in that folder.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from hqsweep.sweep.console import PlainDisplay
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.store.names import run_name
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

WORKERS = 2
VICTIMS = ("worker", "parent", "both")
TABLES = ("metrics", "stats")


CONFIG = {
    "job": "convergence", "sweep": "killed", "model": {"dim": 32, "layers": 1, "heads": 2},
    "data": {"source": "markov", "markov": {"length": 20_000}},
    "train": {"steps": 50, "batch": 2, "context": 32, "log_every": 1, "eval_every": 10, "eval_batches": 1,
              "checkpoint_every": 10, "device": "cpu"},
    "stats": {"every": 10},
}  # fmt: skip


def make_sweep(root: Path, seeds: Sequence[int] = (0, 1)) -> list[RunDir]:
    """Three recipes for each seed, six runs of about two seconds each, with a checkpoint every fifth of their steps."""
    points = [_point(recipe, seed=seed) for recipe in ("bf16", "mxfp8", "nvfp4") for seed in seeds]
    return RunStore(root).create(sweep="killed", conf="killed", overrides=[], runs=points)


def make_study(root: Path, seeds: Sequence[int] = (0, 1)) -> list[RunDir]:
    """For each seed a trunk of fifty steps, and of either of two arms a fork of thirty steps at two of its points."""
    points = []
    for seed in seeds:
        fork = {"at": [20, 50], "steps": 15, "decay": 15, "warmup": 5}
        trunk = _point("bf16", seed=seed, fork=fork)
        forks = [
            _point(recipe, seed=seed, fork=fork | {"at": [at], "trunk": run_name(trunk.config)},
                   train=CONFIG["train"] | {"steps": at + 30})
            for recipe in ("bf16", "nvfp4") for at in fork["at"]
        ]  # fmt: skip
        points += [trunk, *forks]
    return RunStore(root).create(sweep="killed", conf="killed", overrides=[], runs=points)


def _point(recipe: str, **changes: Any) -> SimpleNamespace:
    from hqsweep.config.job import parse  # imports torch, which the parent does without

    config = parse(CONFIG | {"recipe": {"name": recipe, "linear": recipe}} | changes).model_dump(mode="json")
    return SimpleNamespace(config=config, arm=recipe, overrides=[])


def start_parent(runs: list[RunDir]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, str(runs[0].sweep_path)], stdout=subprocess.DEVNULL)


def rows(runs: list[RunDir]) -> list[bytes]:
    return [run.jsonl(table).read_bytes() for run in runs for table in TABLES]


def finish_under_kills(runs: list[RunDir], moments: random.Random, kills: int) -> Counter[str]:
    """Start the sweep again after every kill, and in peace after the last one; returns who was killed how often.

    A kill comes after a random number of new rows, or, one in five, after a random time, often before the first row.
    Raises AssertionError when a finished run is touched again, or one does not finish.
    """
    dealt: Counter[str] = Counter()
    finished: dict[RunDir, bytes] = {}
    while dealt.total() < kills and len(finished) < len(runs):
        parent = start_parent(runs)
        _wait(runs, parent, moments)
        victim = moments.choice(VICTIMS)
        if _kill(parent, victim):
            dealt[victim] += 1
            print(f"kill {dealt.total()} of this sweep: {victim}, {len(finished)} runs were finished", flush=True)
        if victim == "worker":
            time.sleep(moments.uniform(0.0, 1.0))  # the parent goes on for a while
            parent.kill()
        parent.wait()
        _check(finished)
        finished |= {run: run.status_path.read_bytes() for run in runs if run.status()["state"] == "finished"}
    assert start_parent(runs).wait() == 0
    _check(finished)
    assert [run.status()["state"] for run in runs] == ["finished"] * len(runs), [run.status() for run in runs]
    return dealt


def _wait(runs: list[RunDir], parent: subprocess.Popen[bytes], moments: random.Random) -> None:
    if moments.random() < 0.2:
        time.sleep(moments.uniform(0.0, 10.0))
        return
    enough = _count(runs) + moments.randrange(1, 150)
    while _count(runs) < enough and parent.poll() is None:
        time.sleep(moments.uniform(0.0, 0.05))


def _count(runs: list[RunDir]) -> int:
    """Rows of all runs; what a resumed run takes back is not made up for."""
    return sum(run.jsonl("metrics").read_bytes().count(b"\n") for run in runs if run.jsonl("metrics").exists())


def _kill(parent: subprocess.Popen[bytes], victim: str) -> bool:
    """False when the victim was not there."""
    try:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    except FileNotFoundError:
        children = []
    numbers = ([] if victim == "worker" else [parent.pid]) + ([] if victim == "parent" else [int(c) for c in children])
    if parent.poll() is not None or not numbers:
        return False
    for number in numbers[:1] if victim == "worker" else numbers:
        os.kill(number, signal.SIGKILL)
    return True


def _check(finished: dict[RunDir, bytes]) -> None:
    assert all(run.status_path.read_bytes() == status for run, status in finished.items()), (
        "a finished run was repeated"
    )


def main(folder: Path, kills: int, seed: int, make: Callable[[Path], list[RunDir]]) -> int:
    whole = make(folder / "whole")
    assert start_parent(whole).wait() == 0
    moments, dealt, sweeps = random.Random(seed), Counter[str](), 0
    while dealt.total() < kills:
        sweeps += 1
        cut = make(folder / f"cut{sweeps}")
        dealt += finish_under_kills(cut, moments, kills - dealt.total())
        if rows(cut) != rows(whole):
            print(f"sweep {sweeps}: rows differ from those of the sweep left in peace")
            return 1
    print(
        f"{dealt.total()} kills ({dict(dealt)}), {sweeps} sweeps: every run finished, none twice, rows equal to the bit"
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forks", action="store_true", help="a fork study")
    arguments = parser.parse_args()
    if arguments.kills is None:
        runs, limits = RunStore(arguments.folder.parent).runs(arguments.folder.name), Limits(workers=WORKERS, threads=1)
        run_local(runs, display=PlainDisplay(Console()), limits=limits)
    else:
        sys.exit(main(arguments.folder, arguments.kills, arguments.seed, make_study if arguments.forks else make_sweep))
