"""The baseline file of the gate, which is kept in git: what it holds, how it is read, and how it is updated.

    {"version": 2,
     "recipes": {arm: {slot: {"rowwise": "mxfp8", ...}, ...}},             # what each arm was, tensor by tensor
     "draws": [{"sweeps": [...], "runs": [entry, ...]}, ...],              # the same runs, trained once or more often
     "sha256": "..."}                                                      # of all else in the file; early files: none

An entry has a run's losses as hex floats, the sha256 of its loss curves, and what the curves depend on beside the
config: device, threads, ISA, torch, kernel build and data. Where those are equal, losses repeat bit for bit. Elsewhere
a run is one draw of what the same training may end at, and a baseline of one draw may be a lucky one: `--add` keeps
the draws of several machines (or thread counts) side by side. An entry's own sha256 covers all of it, so that a loss
that was edited contradicts its entry.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.recipe.argument import parse_recipe
from hqsweep.recipe.factories import factory_name
from hqsweep.recipe.listing import described
from hqsweep.report.compare.curves import curve_hash, measures
from hqsweep.report.compare.frames import DATA, FORK, Frames
from hqsweep.report.pages.text import text
from hqsweep.sweep.store.run_dir import RunDir

VERSION = 2
FINGERPRINT = ("device.", "threads.", "isa.", "versions.torch.", "kernel_build.", "data_hash.")
UPDATE = "hqsweep baseline update"
EQUAL = "bitwise equal"

Key = tuple[str, int, int]
"""arm, seed, and the step of the trunk at which a fork starts (0 for a whole run)."""
Entry = Mapping[str, Any]
"""arm, seed, point, final_loss (val_loss at the end, hex), decay_loss (mean train_loss over a fork's decay, hex; None
for a whole run), curve_sha256, run_id (of its config alone: its data are in the fingerprint), fingerprint, sha256 (of
all of these)."""
Entries = dict[Key, Entry]
Description = Mapping[str, Any]
"""A recipe as recipe.listing.described gives it."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The content of the baseline file at `path`: the recipes of its arms, and its draws in stored order.

    A draw has its entries and the sweeps that they came from.
    """

    path: Path
    recipes: Mapping[str, Description]
    draws: tuple[Entries, ...] = ()
    sweeps: tuple[Sequence[str], ...] = ()

    @property
    def keys(self) -> list[Key]:
        """Every run that some draw has."""
        return list(dict.fromkeys(key for draw in self.draws for key in draw))

    @property
    def arms(self) -> list[str]:
        """Every arm, in the order of the file."""
        return list(dict.fromkeys(arm for arm, *_ in self.keys))

    def of(self, key: Key) -> list[Entry]:
        """The entries of a run, one for each draw that has it."""
        return [draw[key] for draw in self.draws if key in draw]


def measure(frames: Frames) -> Entries:
    """The entries of every run whose losses are finite."""
    runs = frames.runs.set_index("run")
    curves = {run: curve_hash(rows) for run, rows in frames.metrics.groupby("run")}
    entries = (_entry(final, runs.loc[final.run], curves) for final in measures(frames, window=1).itertuples())
    return {key_of(entry): entry for entry in entries if entry}


def _entry(final: Any, run: pd.Series, curves: Mapping[str, str]) -> Entry | None:
    """The entry of one run, from its rows of curves.measures and of Frames.runs; None without a loss."""
    losses = {"final_loss": final.final_loss} | ({"decay_loss": final.train_loss} if run["design"] == FORK else {})
    if not all(map(math.isfinite, losses.values())):
        return None
    return sealed(
        {"arm": final.arm, "seed": int(final.seed), "point": int(final.point), "decay_loss": None}
        | {name: float(loss).hex() for name, loss in losses.items()}
        | {"curve_sha256": curves[final.run], "run_id": run["config_id"], "fingerprint": fingerprint(run)}
    )


def key_of(entry: Entry) -> Key:
    """What names a run across sweeps."""
    return entry["arm"], entry["seed"], entry["point"]


def data_of(entry: Entry) -> str | None:
    """The hash of the data that an entry's run has read; None where that is not known."""
    return entry["fingerprint"].get("data_hash")


def on_data(stored: Sequence[Entry], data: str | None) -> list[Entry]:
    """The stored entries of a run that have read the data with this hash, as far as that is known of both."""
    return [old for old in stored if data is None or data_of(old) in (None, data)]


def loss_of(entry: Entry) -> float:
    """The loss in nats that decides: a fork's over its decay, a whole run's at the end."""
    return float.fromhex(entry["decay_loss"] or entry["final_loss"])


def recipes_of(runs: pd.DataFrame) -> dict[str, Description]:
    """The recipe of each arm of Frames.runs, tensor by tensor; of a Python factory, which is not imported here, its
    name."""
    recipes = {}
    for arm, path in runs.drop_duplicates("arm").set_index("arm")["path"].items():
        config = RunDir(Path(path)).config()["recipe"]
        try:
            recipes[arm] = described(parse_recipe(config, factory_name))
        except UserError:
            recipes[arm] = {key: text(value) for key, value in config.items() if key != "name"}
    return recipes


def fingerprint(run: pd.Series) -> dict[str, str]:
    """The manifest's leaves under FINGERPRINT, as text, and the hash of the data; `run` is a row of Frames.runs."""
    leaves = {name.removeprefix("manifest."): value for name, value in run.items() if name.startswith("manifest.")}
    leaves["data_hash"] = run[DATA]
    chosen = {name: value for name, value in leaves.items() if f"{name}.".startswith(FINGERPRINT) and pd.notna(value)}
    return {name: text(value) for name, value in chosen.items()}


def sealed(entry: Entry) -> Entry:
    """The entry, or the document, with the sha256 of everything else in it."""
    content = {name: value for name, value in entry.items() if name != "sha256"}
    return content | {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def read_baseline(path: Path) -> Baseline:
    """Return the baseline in a file. Raises UserError, with the reason, for an unusable file."""
    try:
        document = loads(path.read_bytes())
        if document["version"] != VERSION:
            raise UserError(
                f"{path}: a baseline of version {document['version']}, and this hqsweep reads version {VERSION}; "
                f"store it anew with `{UPDATE}`"
            )
        draws = tuple({key_of(entry): entry for entry in draw["runs"]} for draw in document["draws"])
        for entry in (entry for draw in draws for entry in draw.values()):
            _check(entry, path)
        if "sha256" in document and sealed(document)["sha256"] != document["sha256"]:
            raise UserError(
                f"{path}: contradicts its own hash, so recipes were edited, or runs taken out; store it anew with "
                f"`{UPDATE}`"
            )
        sweeps = tuple(draw["sweeps"] for draw in document["draws"])
        return Baseline(path=path, recipes=dict(document["recipes"]), draws=draws, sweeps=sweeps)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no baseline file; store one with `{UPDATE}`") from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: not a baseline file ({type(error).__name__}: {error}); store one with `{UPDATE}`"
        ) from None


def _check(entry: Entry, path: Path) -> None:
    """Raise UserError if an entry's values differ from its sha256."""
    loss_of(entry), entry["curve_sha256"], entry["run_id"], entry["fingerprint"]
    if sealed(entry)["sha256"] != entry["sha256"]:
        arm, seed, point = key_of(entry)
        where = f"seed {seed}" + (f" at step {point}" if point else "")
        raise UserError(
            f"{path}: the entry of '{arm}', {where}, contradicts its own hash, so a loss or a curve was edited; store "
            f"it anew with `{UPDATE}`"
        )


def document(baseline: Baseline) -> dict[str, Any]:
    """Return the baseline as read_baseline() reads it."""
    draws = [
        {"sweeps": list(sweeps), "runs": list(draw.values())}
        for sweeps, draw in zip(baseline.sweeps, baseline.draws, strict=True)
    ]
    return sealed({"version": VERSION, "recipes": dict(baseline.recipes), "draws": draws})
