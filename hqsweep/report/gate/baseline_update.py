"""`hqsweep baseline update`: stores a sweep as the baseline, or as one more draw of it, and shows the changes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.text import Text

from hqsweep.errors import UserError
from hqsweep.report.compare.frames import load
from hqsweep.report.compare.left_out import note
from hqsweep.report.compare.studies import arms_of, of_one_data, study_of
from hqsweep.report.gate.baseline import (
    UPDATE,
    Baseline,
    Entries,
    Key,
    data_of,
    document,
    loss_of,
    measure,
    on_data,
    read_baseline,
    recipes_of,
)
from hqsweep.report.gate.change import difference, equal, recipe_changes
from hqsweep.report.pages.text import Fitted, TextTable, number, to_rich
from hqsweep.sweep.store.files import write_json
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.train.corpus import SHOWN_DIGITS


@dataclass(frozen=True, kw_only=True)
class Update:
    """The result of an update.

    rows: arm, seed, point (0 for a whole run), stored and now (losses in nats, None for none; stored is the mean over
    the draws), gap and change. draws: the number of draws in the file. note: the written content, or why nothing was
    written. refused: whether the runs were unfit for it.
    """

    path: Path
    rows: tuple[dict[str, Any], ...]
    draws: int
    note: str
    refused: bool = False

    def table(self) -> Fitted:
        """The runs for a terminal."""
        forks = any(row["point"] for row in self.rows)
        names = ("arm", "seed", *(["point"] if forks else []), "stored", "now", "gap", "change")
        specs = {"stored": ".6f", "now": ".6f", "gap": "+.6f"}
        rows = tuple(
            tuple(number(row[name], specs[name]) if name in specs else str(row[name]) for name in names)
            for row in self.rows
        )
        header = tuple("gap (nats)" if name == "gap" else name for name in names)
        numeric = frozenset(range(1, len(names) - 1))
        shown = to_rich(TextTable(header=header, rows=rows, numeric=numeric), f"baseline {self.path}")
        shown.caption = Text(self.note)
        return shown


def update(run_dirs: Iterable[RunDir], path: Path, add: bool = False) -> Update:
    """Store these runs as the baseline, all of it, and say what was there; with `add`, store them as one more draw
    beside those that are there. Nothing is written when a run is missing, is damaged, has read other data than the
    baseline arm or has no final loss, or when the draw to be added has no curve that is new. Without `add` a file that
    is no baseline counts as an empty one.

    Raises UserError for no convergence run, whole runs beside forks, and, with `add`, for no usable baseline, or runs
    that it lacks, or has with another config or on other data: a draw is the same training again.
    """
    run_dirs = list(run_dirs)
    frames, trunks = load(run_dirs).of_job("convergence").of_design()
    frames, _ = of_one_data(frames, trunks, arms_of(frames.runs, study_of(run_dirs, margin=1.0).baseline))
    now, runs, recipes = measure(frames), frames.runs, recipes_of(frames.runs)
    old = _stored(path, add)
    rows = tuple(_change(key, now, old, recipes) for key in dict.fromkeys([*now, *old.keys]))
    if frames.left_out:
        lost = f"{path} was not written: {note(frames.left_out)[0]}"
        return Update(path=path, rows=rows, draws=len(old.draws), note=lost, refused=True)
    if len(now) < len(runs):
        holes = f"{path} was not written: {len(runs) - len(now)} of {len(runs)} runs have no final loss"
        return Update(path=path, rows=rows, draws=len(old.draws), note=holes, refused=True)
    if add:
        _same_training(now, old, recipes)
        if all(equal(new, old.of(key)) for key, new in now.items()):
            known = f"{path} has these draws already, bit for bit: another machine or thread count would give a new one"
            return Update(path=path, rows=rows, draws=len(old.draws), note=known)
    before = old if add else Baseline(path=path, recipes={})
    new = Baseline(
        path=path,
        recipes={**before.recipes, **recipes},
        draws=(*before.draws, now),
        sweeps=(*before.sweeps, sorted(set(runs["sweep"]))),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document(new))
    count = len(new.draws)
    return Update(path=path, rows=rows, draws=count, note=f"stored {path}: {count} draw{'s' * (count > 1)} of each run")


def _stored(path: Path, needed: bool) -> Baseline:
    """The baseline that is there; an empty one for none, unless it is needed."""
    try:
        return read_baseline(path)
    except UserError:
        if needed:
            raise
        return Baseline(path=path, recipes={})


def _same_training(now: Entries, old: Baseline, recipes: dict[str, Any]) -> None:
    """UserError where no run is stored, and for the first one that was stored with another config."""
    if not set(now) & set(old.keys):
        raise UserError(f"{old.path}: none of these runs is stored there, and a draw is the same training again")
    for key, new in now.items():
        others = [entry for entry in old.of(key) if entry not in on_data([entry], data_of(new))]
        if others:
            raise UserError(
                f"{old.path}: '{key[0]}' was stored with other data (hash {data_of(others[0])[:SHOWN_DIGITS]}, and this"
                f" run has read {data_of(new)[:SHOWN_DIGITS]}), and a draw is the same training again; replace the"
                f" baseline with `{UPDATE}` without --add"
            )
        if any(stored["run_id"] != new["run_id"] for stored in old.of(key)):
            formats = recipe_changes(old.recipes.get(key[0], {}), recipes[key[0]])
            why = f" ({formats})" if formats else ""
            raise UserError(
                f"{old.path}: '{key[0]}' was stored with another config{why}, and a draw is the same training again; "
                f"replace the baseline with `{UPDATE}` without --add"
            )


def _change(key: Key, now: Entries, old: Baseline, recipes: dict[str, Any]) -> dict[str, Any]:
    arm, seed, point = key
    new = now.get(key)
    stored = on_data(old.of(key), data_of(new)) if new else old.of(key)
    losses = {
        "stored": fmean(map(loss_of, stored)) if stored else None,
        "now": loss_of(new) if new else None,
    }
    if new and stored:
        change = difference([(new, stored)], recipe_changes(old.recipes.get(arm, {}), recipes[arm]))
    elif new and old.of(key):
        change = f"other data: {data_of(old.of(key)[0])[:SHOWN_DIGITS]} -> {data_of(new)[:SHOWN_DIGITS]}"
    else:
        change = "dropped" if stored else "new"
    gap = losses["now"] - losses["stored"] if new and stored else None
    return {"arm": arm, "seed": seed, "point": point, **losses, "gap": gap, "change": change}
