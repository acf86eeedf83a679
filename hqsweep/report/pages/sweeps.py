"""`hqsweep ls` and `hqsweep show SWEEP`: pages of sweeps for a terminal, and the same content for --json."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hqsweep.errors import Damaged, UserError, nearest
from hqsweep.report.compare.left_out import stranger
from hqsweep.report.pages.text import TextTable, number, text, to_rich
from hqsweep.sweep.store import edits
from hqsweep.sweep.store.run_dir import UNUSABLE, RunDir, unusable
from hqsweep.sweep.store.store import RunStore, foreign

STATES = ("finished", "running", "pending", "interrupted", "failed", "damaged", "missing", "foreign")


def list_sweeps(
    store: RunStore, tag: str | None = None, choose: Callable[[list[dict[str, Any]]], list[int]] | None = None
) -> tuple[RenderableType, list[dict[str, Any]]]:
    """(table, dicts): for each sweep its conf, when it was created, arms, runs (in a fork study trunks, which are no
    arm, and forks), how many of them are in each state, its notes, and the faults of runs that are damaged, missing or
    foreign; newest last. tag: only sweeps that have it, or runs that do. choose: gets the facts of each sweep, and
    returns the numbers of those to list, in order. UserError where none has the tag."""
    sweeps = [entry_of(store.root / name) for name in store.sweeps()]
    if tag is not None:
        sweeps = _tagged(sweeps, tag)
    if sweeps and choose:
        sweeps = [sweeps[place] for place in choose([_cells(sweep) for sweep in sweeps])]
        if not sweeps:
            return Text(f"no sweep in {store.root} for which that holds"), []
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
            *_said(sweep["notes"], tag),
        )
        for sweep in sweeps
    )
    header = ("sweep", "conf", "created (UTC)", "arms", "runs", "states", "tags", "note")
    table = TextTable(header=header, rows=rows, numeric=frozenset({3, 4}))
    for name in ("tags", "note"):
        table = table if table.column(name) - {""} else table.without(name)
    page = to_rich(table, f"sweeps in {store.root}", drop=("created (UTC)", "conf", "arms"))
    return Group(page, *(Text(fault) for sweep in sweeps for fault in sweep["faults"])), sweeps


def _cells(sweep: dict[str, Any]) -> dict[str, Any]:
    """What conditions see of a sweep: its facts, the number of runs in each state, tags and note."""
    said = sweep["notes"].values()
    words = {"tags": sorted({tag for each in said for tag in each["tags"]})}
    words["note"] = sweep["notes"].get("", {"note": ""})["note"]
    facts = {key: sweep[key] for key in ("sweep", "conf", "created", "overrides", "runs", "trunks", "forks")}
    return facts | {"arms": len(sweep["arms"])} | words | {state: sweep["states"].get(state, 0) for state in STATES}


def _tagged(sweeps: list[dict[str, Any]], tag: str) -> list[dict[str, Any]]:
    """The sweeps that have the tag, or have a run with it."""
    known = {word for sweep in sweeps for said in sweep["notes"].values() for word in said["tags"]}
    if tag not in known:
        there = f"there are {', '.join(sorted(known))}" if known else "`hqsweep tag SWEEP +NAME` adds one"
        raise UserError(f"--tag: nothing has the tag '{tag}'{nearest(tag, known)}; {there}")
    return [sweep for sweep in sweeps if any(tag in said["tags"] for said in sweep["notes"].values())]


def _said(said: dict[str, dict[str, Any]], asked: str | None) -> tuple[str, str]:
    """The tags and the note of a sweep; runs with the tag that was asked for stand under the note."""
    own = said.get("", {"tags": [], "note": ""})
    on_runs = {run: note for run, note in said.items() if run and note["tags"]}
    counts = Counter(tag for note in on_runs.values() for tag in note["tags"])
    tags = [*own["tags"], *(f"{tag} (of {count} run{'s' * (count > 1)})" for tag, count in counts.items())]
    runs = [f"{run}: {note['note']}".rstrip(": ") for run, note in on_runs.items() if asked in note["tags"]]
    return ", ".join(tags), "\n".join(line for line in (own["note"], *runs) if line)


def _counted(sweep: dict[str, Any]) -> str:
    """The number of runs; in a fork study the numbers of trunks and of forks."""
    parts = [(sweep["trunks"], "trunk"), (sweep["forks"], "fork")] if sweep["forks"] else []
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in parts) or str(sweep["runs"])


def entry_of(folder: Path) -> dict[str, Any]:
    """The facts of a sweep's folder, as list_sweeps() lists them."""
    store, name = RunStore(folder.parent), folder.name
    try:
        document, runs = store.facts(name), store.runs(name)
    except Damaged as fault:
        return {
            "sweep": name, "conf": "", "created": "", "overrides": [], "arms": [], "study": {}, "runs": 0, "trunks": 0,
            "forks": 0, "states": {"damaged": 1}, "notes": _notes(store.root / name), "faults": [str(fault)],
        }  # fmt: skip
    seen = [_seen(run) for run in runs]
    lost = [stranger(run) for run in foreign(store.root / name)]
    states = Counter([*(status["state"] for status in seen), *(entry.state for entry in lost)])
    faults = [status["reason"] for status in seen if status["state"] in UNUSABLE]
    good = [run for run, status in zip(runs, seen, strict=True) if status["state"] not in UNUSABLE]
    sections = [run.fork() for run in good] if document["study"].get("fork") else []
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
        "notes": _notes(store.root / name),
        "faults": [*faults, *(entry.line for entry in lost)],
    }


def _seen(run: RunDir) -> dict[str, Any]:
    """RunDir.seen(), with a check of the config of a run in progress, which no seal covers."""
    status = run.seen()
    if status["state"] not in (*UNUSABLE, "finished"):
        try:
            run.fork()
        except Damaged as fault:
            return unusable(fault)
    return status


def _notes(folder: Path) -> dict[str, dict[str, Any]]:
    """Name of a run ("" for the sweep) -> {"note", "tags"}; for a damaged file its fault, as the note."""
    try:
        said = edits.read(folder)
    except Damaged as fault:
        said = {"": edits.Note(note=str(fault))}
    return {name: {"note": own.note, "tags": list(own.tags)} for name, own in said.items() if own != edits.Note()}


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
        edits.line(edits.Note(note=said["note"], tags=tuple(said["tags"]))),
    ]
    parts: list[RenderableType] = [Text(folder.name, style="bold"), *(Text(line) for line in lines if line)]
    parts += [_arms_table(rows), Text(), _runs_table(rows)] if rows else []
    parts += [Text(fault) for fault in entry["faults"]]
    return Group(*parts), entry


def _row(run: RunDir) -> dict[str, Any]:
    """run, arm, seed, point, state, step, steps, loss (nats), reason; None for an unknown value."""
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
