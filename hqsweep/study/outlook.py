"""What `hqsweep run` would do with a plan: the state of each run, and the minutes that are ahead."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hqsweep.config.job import Config
from hqsweep.errors import Damaged, UserError
from hqsweep.study.forecast import pace, registry
from hqsweep.study.sequential import Plan
from hqsweep.sweep.engine.process import slots
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train.record import checkpoints, record_path

Kind = tuple[str, ...]
"""The job or design of a run, the size of its steps, and, where it is known more closely, its arm."""
OF_A_STEP = ("batch", "microbatches", "context", "dtype", "device", "recompute", "compile", "parallel")
"""The keys of `train` that decide how long a step takes."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """rows: those of the plan, each with `state` (finished, running, or what is to be done) and the `minutes` that it
    still needs (None: not known). minutes, most: those of all runs that are to be done, at as many at a time as the
    plan has workers, the least and the greatest that comparable studies say; None where nothing says how long they
    take. basis: the source of the minutes, in words."""

    rows: tuple[Mapping[str, Any], ...]
    to_do: int
    minutes: float | None
    most: float | None
    basis: str


def outlook(plan: Plan, rows: Sequence[Mapping[str, Any]], *, force: bool = False) -> Outlook:
    """The outlook of a plan whose runs are `rows`; force: whether finished ones are repeated."""
    first = plan.first
    folder = Path(first.runs_dir) / first.sweep
    seconds = _known_seconds(RunStore(Path(first.runs_dir)), first.sweep)
    seen, left = [], []
    for row, config in zip(rows, plan.configs, strict=True):
        run = RunDir(folder / row["run"])
        state, done = _state(run, force)
        steps = 0 if state == "finished" else _steps(config) - done
        kind = _kind(config)
        size = _size(row["config"])
        a_step = seconds.get((kind, size, row["arm"]), seconds.get((kind, size)))
        minutes = None if a_step is None else steps * a_step / 60
        seen.append({**row, "state": state, "minutes": minutes})
        left.append((config, steps))
    to_do = sum(steps > 0 for _, steps in left)
    low, high, basis = _all_minutes(plan, seen, left)
    return Outlook(rows=tuple(seen), to_do=to_do, minutes=low, most=high, basis=basis)


def _state(run: RunDir, force: bool) -> tuple[str, int]:
    """What is to be done with a run, and the number of its own steps that are done."""
    status = run.seen()
    state = status["state"]
    if state == "finished" and not force:
        return "finished", 0
    if force or state in ("missing", "damaged"):
        return "to do" if state == "missing" else "to do again", 0
    last = max((step for step, path in checkpoints(run.checkpoint).items() if record_path(path).exists()), default=0)
    if state == "running":
        return "running", last
    return (f"to do from step {last}" if last else "to do"), last


def _kind(config: Config) -> str:
    fork = getattr(config, "fork", None)
    return config.job if fork is None else "trunk" if fork.is_trunk else "fork"


def _steps(config: Config) -> int:
    """The steps of the run itself; 1 for a job that has none."""
    return config.own_steps if hasattr(config, "own_steps") else 1


def _known_seconds(store: RunStore, sweep: str) -> dict[Kind, float]:
    """Kind -> the seconds that a step took in the finished runs of the sweep."""
    seconds: defaultdict[Kind, list[float]] = defaultdict(list)
    for run in _listed(store, sweep):
        try:
            status, manifest = run.status(), run.manifest()
            if status["state"] != "finished":
                continue
            size = _size(run.config())
        except (Damaged, KeyError, TypeError):
            continue
        job, point, progress = manifest["job"], manifest.get("point"), status["progress"]
        kind = "fork" if point is not None else "trunk" if run.name.startswith("trunk-") else job
        steps = progress["steps"] - (point or 0) if job == "convergence" and progress else 1
        for key in ((kind, size, manifest["arm"]), (kind, size)):
            seconds[key].append(status["seconds"] / max(steps, 1))
    return {key: sum(values) / len(values) for key, values in seconds.items()}


def _size(config: Mapping[str, Any]) -> str:
    """What decides, beside the recipe, how long a step takes: the model, without its noise, and the train section
    without the keys of its length and its learning rate."""
    model = {key: value for key, value in (config.get("model") or {}).items() if key != "init_noise"}
    train = config.get("train") or {}
    return json.dumps([model, {key: train.get(key) for key in OF_A_STEP}], sort_keys=True)


def _listed(store: RunStore, sweep: str) -> list[RunDir]:
    try:
        return store.runs(sweep)
    except Damaged:  # a list that the next run makes again
        return []


def _all_minutes(
    plan: Plan, rows: Sequence[Mapping[str, Any]], left: Sequence[tuple[Config, int]]
) -> tuple[float | None, float | None, str]:
    """The least and the greatest number of minutes of all that is to be done, and their source."""
    engine, known = plan.first.engine, [row["minutes"] for row in rows if row["state"] != "finished"]
    if all(minutes is not None for minutes in known):
        count = len(slots(engine.workers, engine.runs_per_gpu)) if engine.kind == "local" else engine.workers or 1
        minutes = math.fsum(known) / max(min(count, len(known)), 1)
        return minutes, minutes, "by the finished runs of this sweep"
    try:
        measured = pace(plan, registry(Path(plan.first.runs_dir)))
    except Damaged as fault:
        return None, None, f"no study is read, for {fault}"
    except UserError:  # of a job that trains no model
        measured = "no study is of such a job"
    if isinstance(measured, str):
        return None, None, f"no run like these has finished in this sweep, and {measured}"
    tokens = sum(steps * config.train.batch * config.train.context for config, steps in left)
    return tokens * measured.low / 60, tokens * measured.high / 60, f"by {measured.basis}"
