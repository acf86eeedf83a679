"""The baseline file of the gate, which is kept in git: what it holds, how it is read, and how it is updated.

Per arm and seed it has the final val_loss as a hex float, the sha256 of the loss curves, and what the curves depend on
beside the config: device, threads, ISA, torch, kernel build and data. Where those are equal, losses repeat bit for bit.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from hqsweep.errors import UserError
from hqsweep.report.curves import measures
from hqsweep.report.frames import Frames, load
from hqsweep.report.text import TextTable, number, text, to_rich
from hqsweep.sweep.files import write_json
from hqsweep.sweep.store import RunDir

VERSION = 1
FINGERPRINT = ("device.", "threads.", "isa.", "versions.torch.", "kernel_build.", "data_hash.")
UPDATE = "hqsweep baseline update"
EQUAL = "bitwise equal"

Entry = Mapping[str, Any]
"""arm, seed, final_loss (hex), curve_sha256, run_id, fingerprint."""
Entries = dict[tuple[str, int], Entry]
"""(arm, seed) -> its entry."""


def measure(frames: Frames) -> Entries:
    """The entries of every run with a finite final loss."""
    runs = frames.runs.set_index("run")
    curves = {run: curve_hash(rows) for run, rows in frames.metrics.groupby("run")}
    return {
        (final.arm, final.seed): {
            "arm": final.arm,
            "seed": int(final.seed),
            "final_loss": float(final.final_loss).hex(),
            "curve_sha256": curves[final.run],
            "run_id": runs.at[final.run, "run_id"],
            "fingerprint": fingerprint(runs.loc[final.run]),
        }
        for final in measures(frames, window=1).itertuples()
        if math.isfinite(final.final_loss)
    }


def fingerprint(run: pd.Series) -> dict[str, str]:
    """The manifest's leaves under FINGERPRINT, as text; `run` is a row of Frames.runs."""
    leaves = {name.removeprefix("manifest."): value for name, value in run.items() if name.startswith("manifest.")}
    chosen = {name: value for name, value in leaves.items() if f"{name}.".startswith(FINGERPRINT) and pd.notna(value)}
    return {name: text(value) for name, value in chosen.items()}


def curve_hash(rows: pd.DataFrame) -> str:
    """sha256 over step and exact value of every train_loss and val_loss row of a run."""
    losses = rows[rows["metric"].isin(["train_loss", "val_loss"])].sort_values(["metric", "step"])
    lines = (f"{row.metric} {row.step} {row.value.hex()}\n" for row in losses.itertuples())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def gap(new: Entry, old: Entry) -> float:
    """Final val_loss of the one minus that of the other, in nats."""
    return float.fromhex(new["final_loss"]) - float.fromhex(old["final_loss"])


def comparable(new: Entry, old: Entry) -> bool:
    """Whether the two must be equal bit for bit: the same config on an equal machine."""
    return new["run_id"] == old["run_id"] and new["fingerprint"] == old["fingerprint"]


def difference(pairs: Sequence[tuple[Entry, Entry]]) -> str:
    """Says that all curves are equal, or why they may differ: another config, another machine or build, or neither.
    `pairs` are (new, stored)."""
    if all(new["curve_sha256"] == old["curve_sha256"] for new, old in pairs):
        return EQUAL
    if any(new["run_id"] != old["run_id"] for new, old in pairs):
        return "curves differ, and so does the config"
    changes = {
        f"{name} {old['fingerprint'].get(name)} -> {new['fingerprint'].get(name)}"
        for new, old in pairs
        for name in new["fingerprint"] | old["fingerprint"]
        if new["fingerprint"].get(name) != old["fingerprint"].get(name)
    }
    if not changes:
        return "curves differ on an equal machine and config"
    return f"curves differ, and so does {', '.join(sorted(changes))}"


def read_baseline(path: Path) -> Entries:
    """Raises UserError, saying why, when the file is no usable baseline."""
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise UserError(
                f"{path}: a baseline of version {document['version']}, and this hqsweep reads version {VERSION}; "
                f"store it anew with `{UPDATE}`"
            )
        entries = {(entry["arm"], entry["seed"]): entry for entry in document["runs"]}
        for entry in entries.values():
            float.fromhex(entry["final_loss"]), entry["curve_sha256"], entry["run_id"], entry["fingerprint"]
        return entries
    except FileNotFoundError:
        raise UserError(f"{path}: there is no baseline file; store one with `{UPDATE}`") from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: not a baseline file ({type(error).__name__}: {error}); store one with `{UPDATE}`"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Update:
    """The changes of an update: `rows` have arm, seed, stored and now (final val_losses in nats, None for none), gap
    and change; `refused` says why nothing was written."""

    path: Path
    rows: tuple[dict[str, Any], ...]
    refused: str | None = None

    def table(self) -> Table:
        """The runs for a terminal."""
        header = ("arm", "seed", "stored", "now", "gap (nats)", "change")
        losses = ("stored", "now")
        rows = tuple(
            (
                row["arm"],
                str(row["seed"]),
                *(number(row[key], ".6f") for key in losses),
                number(row["gap"], "+.6f"),
                row["change"],
            )
            for row in self.rows
        )
        shown = to_rich(TextTable(header=header, rows=rows, numeric=frozenset({1, 2, 3, 4})), f"baseline {self.path}")
        shown.caption = Text(self.refused or f"stored {self.path}")
        return shown


def update(run_dirs: Iterable[RunDir], path: Path) -> Update:
    """Store these runs as the baseline, all of it, and say what was there. Nothing is written when a run has no final
    loss. A file that is no baseline counts as an empty one. Raises UserError for no convergence run."""
    frames = load(run_dirs).of_job("convergence")
    now, runs = measure(frames), frames.runs
    try:
        stored = read_baseline(path)
    except UserError:
        stored = {}
    rows = tuple(_change(key, now.get(key), stored.get(key)) for key in dict.fromkeys([*now, *stored]))
    if len(now) < len(runs):
        holes = f"{path} was not written: {len(runs) - len(now)} of {len(runs)} runs have no final loss"
        return Update(path=path, rows=rows, refused=holes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"version": VERSION, "sweeps": sorted(set(runs["sweep"])), "runs": list(now.values())})
    return Update(path=path, rows=rows)


def _change(key: tuple[str, int], new: Entry | None, old: Entry | None) -> dict[str, Any]:
    both = new is not None and old is not None
    losses = {
        name: float.fromhex(entry["final_loss"]) if entry else None for name, entry in (("stored", old), ("now", new))
    }
    change = difference([(new, old)]) if both else "new" if old is None else "dropped"
    return {"arm": key[0], "seed": key[1], **losses, "gap": gap(new, old) if both else None, "change": change}
