"""Runs in hqsweep's own folders as logs, of any job that trains. A run counts when it has finished; any other is left
out by name."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from hqsweep.errors import UserError
from hqsweep.foreign_logs.trackers import Run, Runs
from hqsweep.report.compare.left_out import stranger
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import known, runs_in


def sweep_source(folder: Path) -> Runs:
    """The finished runs of a sweep as logs."""
    return source(runs_in(folder), str(folder))


def source(runs: Iterable[RunDir], where: str) -> Runs:
    """The finished runs as logs; left_out has a sentence on each other one. UserError where none has finished."""
    ours, strangers = known(runs)
    read, left_out = [], [stranger(run).line for run in strangers]
    for run in ours:
        status = run.seen()
        if status["state"] != "finished":
            why = f" ({status['reason']})" if status["reason"] else ""
            left_out.append(f"{run.name} is {status['state']}{why}.")
        elif (logged := _logged(run)) is not None:
            read.append(logged)
    if not read:
        raise UserError(f"{where}: no run has finished; {left_out[0] if left_out else 'there is none'}")
    return Runs(where, read, "step", tuple(left_out))


def _logged(run: RunDir) -> Run | None:
    """A finished run; None for a trunk, which is of no arm."""
    manifest, fork = run.manifest(), run.fork()
    if fork is not None and fork.is_trunk:
        return None
    rows: dict[str, dict[float, float]] = {}
    for row in run.rows("metrics"):
        rows.setdefault(row["metric"], {})[row["step"]] = row["value"]
    facts = {"arm": manifest["arm"], "seed": manifest["seed"]}
    if fork is not None:
        facts |= {"trunk": manifest["trunk"], "point": manifest["point"]}
    return Run(facts=facts, metrics=list(rows), curve=partial(_curve, rows))


def _curve(rows: Mapping[str, Mapping[float, float]], metric: str) -> Mapping[float, float]:
    return rows.get(metric, {})
