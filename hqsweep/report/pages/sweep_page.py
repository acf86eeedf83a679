"""`hqsweep show SWEEP`: command, states, arms and runs, and the same content as a plain dict for --json."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hqsweep.errors import Damaged
from hqsweep.report.pages.listing import STATES, entry_of
from hqsweep.report.pages.text import TextTable, number, text, to_rich
from hqsweep.sweep.store import notes
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

HEADER = ("run", "arm", "seed", "point", "state", "step", "loss", "reason")
DROP = ("arm", "seed", "point", "loss", "step")
"""The headings that a narrow terminal goes without, the first one first: the name of a run has the first three."""


def show_sweep(folder: Path) -> tuple[RenderableType, dict[str, Any]]:
    """(page, dict) of a sweep's folder: the facts of `hqsweep ls`, and under "runs" a dict for each run."""
    entry = entry_of(folder)
    with suppress(Damaged):
        entry["runs"] = [_row(run) for run in RunStore(folder.parent).runs(folder.name)]
    rows = entry["runs"] if isinstance(entry["runs"], list) else []
    said = entry["notes"].get("", {"note": "", "tags": []})
    lines = [
        f"{_states(Counter(entry['states']))}; conf={entry['conf']} {' '.join(entry['overrides'])}".rstrip(),
        f"made {entry['created'][:16].replace('T', ' ')} UTC in {folder}",
        notes.line(notes.Note(note=said["note"], tags=tuple(said["tags"]))),
    ]
    parts: list[RenderableType] = [Text(folder.name, style="bold"), *(Text(line) for line in lines if line)]
    parts += [_arms_table(rows), Text(), _runs_table(rows)] if rows else []
    parts += [Text(fault) for fault in entry["faults"]]
    return Group(*parts), entry


def _row(run: RunDir) -> dict[str, Any]:
    """run, arm, seed, point, state, step, steps, loss (nats), reason; None for what is unknown."""
    status, manifest = run.seen(), dict[str, Any]()
    with suppress(Damaged):
        manifest = run.manifest()
    progress = status["progress"] or {}
    arm = "trunk" if run.name.startswith("trunk-") else manifest.get("arm")
    known = {name: manifest.get(name) for name in ("seed", "point")}
    known |= {name: progress.get(name) for name in ("step", "steps", "loss")}
    return {"run": run.name, "arm": arm, **known, "state": status["state"], "reason": status["reason"]}


def _states(states: Mapping[str, int]) -> str:
    """A text such as: 3 finished, 1 failed."""
    return ", ".join(f"{states[state]} {state}" for state in STATES if states.get(state)) or "no run"


def _arms_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    arms = dict.fromkeys(text(row["arm"]) for row in rows)
    cells = []
    for arm in arms:
        own = [row for row in rows if text(row["arm"]) == arm]
        cells.append((arm, str(len({row["seed"] for row in own})), _states(Counter(row["state"] for row in own))))
    return to_rich(TextTable(header=("arm", "seeds", "runs"), rows=tuple(cells), numeric=frozenset({1})), "")


def _runs_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    cells = tuple(
        (
            row["run"],
            *(text(row[name]) for name in ("arm", "seed", "point", "state")),
            "-" if row["step"] is None else f"{row['step']}/{row['steps']}",
            number(row["loss"]),
            text(row["reason"]),
        )
        for row in rows
    )
    table = TextTable(header=HEADER, rows=cells, numeric=frozenset({2, 3, 6}))
    for name in ("point", "reason"):
        table = table.without(name) if table.column(name) == {"-"} else table
    return to_rich(table, "", drop=DROP)
