"""`hqsweep ls`: what to print, and the same facts as plain dicts for --json."""

from collections import Counter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hqsweep.report.text import TextTable, to_rich
from hqsweep.sweep.store import RunStore

STATES = ("finished", "running", "pending", "interrupted", "failed")


def list_sweeps(store: RunStore) -> tuple[RenderableType, list[dict[str, Any]]]:
    """(table, dicts): per sweep its conf, when it was made, arms, runs (of a fork study trunks, which are no arm, and
    forks), and how many of them are in each state; newest last."""
    sweeps = [_sweep(store, name) for name in store.sweeps()]
    if not sweeps:
        return Text(f"no sweep in {store.root}; `hqsweep run conf=quickstart` makes one"), []
    rows = tuple(
        (
            sweep["sweep"],
            sweep["conf"],
            sweep["created"][:16].replace("T", " "),
            str(len(sweep["arms"])),
            _counted(sweep),
            ", ".join(f"{sweep['states'][state]} {state}" for state in STATES if state in sweep["states"]),
        )
        for sweep in sweeps
    )
    header = ("sweep", "conf", "created (UTC)", "arms", "runs", "states")
    return to_rich(TextTable(header=header, rows=rows, numeric=frozenset({3, 4})), f"sweeps in {store.root}"), sweeps


def _counted(sweep: dict[str, Any]) -> str:
    """The number of runs, of a fork study by what they are."""
    parts = [(sweep["trunks"], "trunk"), (sweep["forks"], "fork")] if sweep["forks"] else []
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in parts) or str(sweep["runs"])


def _sweep(store: RunStore, name: str) -> dict[str, Any]:
    document, runs = store.facts(name), store.runs(name)
    states = Counter(run.status()["state"] for run in runs)
    sections = [run.fork() for run in runs] if document["study"].get("fork") else []
    trunks = sum(section is not None and section.is_trunk for section in sections)
    return {
        "sweep": name,
        "conf": document["conf"],
        "created": document["created"],
        "overrides": document["overrides"],
        "arms": document["arms"],
        "study": document["study"],
        "runs": states.total(),
        "trunks": trunks,
        "forks": len(sections) - trunks,
        "states": dict(states),
    }
