"""The gate for CI: this sweep against a baseline file that is kept in git.

The file holds, per arm and seed, the final val_loss as a hex float, the sha256 of the loss curves, and what the
curves depend on (device, threads, ISA, torch, kernel build), because CPU losses repeat bit for bit only where those
are equal. Runs are paired by arm and seed, so the seed's own spread cancels. `hqsweep gate` exits with
`Verdicts.exit_code`.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from rich.table import Table
from rich.text import Text

from hqsweep.errors import UserError
from hqsweep.report.curves import measures
from hqsweep.report.frames import Frames, load
from hqsweep.report.text import TextTable, number, text, to_rich
from hqsweep.report.verdict import fault
from hqsweep.sweep.files import write_json
from hqsweep.sweep.store import RunDir

VERSION = 1
FINGERPRINT = ("device.", "threads.", "isa.", "versions.torch.", "kernel_build.")
STYLE = {"pass": "green", "new": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One arm: `outcome` is pass, regression, failed, missing (a stored run is not in the sweep) or new (the arm is
    not in the baseline); `gap` is the mean of this sweep's final val_loss minus the stored one in nats, over `seeds`
    common seeds (NaN for none)."""

    arm: str
    outcome: str
    gap: float
    seeds: int
    bitwise: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All arms; `problem` says why there is no usable baseline; `written` is the baseline file when it was updated, and
    `refused` says why it was not."""

    verdicts: tuple[Verdict, ...] = field(default=())
    problem: str | None = None
    written: Path | None = None
    refused: str | None = None

    @property
    def exit_code(self) -> int:
        """4 no usable baseline; 1 a regression; 3 a failed or missing run; 0 all good, and after an update."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        if self.problem:
            return 4
        if self.written:
            return 0
        return 1 if "regression" in outcomes else 3 if outcomes & {"failed", "missing"} else 0

    def rows(self) -> list[dict]:
        """The arms, and the problem if there is one, as rows for junit.write."""
        cases = [(verdict.arm, verdict.outcome in STYLE, verdict.note) for verdict in self.verdicts]
        cases += [("baseline", False, self.problem)] if self.problem else []
        return [
            {"check": "gate", "case": case, "status": "PASS" if good else "FAIL", "note": note}
            for case, good, note in cases
        ]

    def table(self) -> Table:
        """The arms for a terminal."""
        rows = tuple((v.arm, v.outcome, number(v.gap, "+.6f"), str(v.seeds), v.note) for v in self.verdicts)
        header = ("arm", "verdict", "gap (nats)", "seeds", "note")
        table = TextTable(header=header, rows=rows, numeric=frozenset({2, 3}))
        shown = to_rich(table, "gate", [STYLE.get(verdict.outcome, "red") for verdict in self.verdicts])
        shown.caption = self.refused and Text(self.refused)
        return shown


def gate(run_dirs: Iterable[RunDir], baseline_file: Path, max_gap: float = 0.01, update: bool = False) -> Verdicts:
    """Judge each arm: a regression when its mean paired gap exceeds `max_gap` nats, or a run that the baseline has now
    diverges. `update` stores this sweep as the new baseline instead, only when every run has finished, and gives the
    verdicts against the old one where there was one.

    Raises UserError for no convergence run, or max_gap < 0.
    """
    if not max_gap >= 0:
        raise UserError(f"max_gap: {max_gap} nats; give 0 (no loss may rise) or more")
    frames = load(run_dirs).of_job("convergence")
    now = measure(frames)
    try:
        stored, problem = read_baseline(baseline_file), None
    except UserError as error:
        stored, problem = {}, str(error)
    arms = frames.runs.groupby("arm", sort=False)
    verdicts = tuple(_judge(arm, runs, now, stored, max_gap) for arm, runs in arms) + _absent(frames.runs, stored)
    if update:
        return _update(baseline_file, frames.runs, now, verdicts)
    known = dict.fromkeys(arm for arm, _ in stored)
    if problem is None and not set(known) & set(frames.runs["arm"]):
        problem = f"{baseline_file}: no arm in common with these runs (its arms: {', '.join(known)})"
    return Verdicts(verdicts=verdicts, problem=problem)


def measure(frames: Frames) -> dict[tuple[str, int], dict]:
    """(arm, seed) -> the baseline's entry, for every run with a finite final loss."""
    facts = frames.runs.set_index("run")
    curves = {run: curve_hash(rows) for run, rows in frames.metrics.groupby("run")}
    entries = {}
    for final in measures(frames, window=1).itertuples():
        if math.isfinite(final.final_loss):
            entries[final.arm, final.seed] = {
                "arm": final.arm, "seed": int(final.seed), "final_loss": float(final.final_loss).hex(),
                "curve_sha256": curves[final.run], "run_id": facts.at[final.run, "run_id"],
                "fingerprint": fingerprint(facts.loc[final.run]),
            }  # fmt: skip
    return entries


def fingerprint(facts: pd.Series) -> dict[str, str]:
    """The manifest's leaves under FINGERPRINT, as text; `facts` is a row of runs."""
    leaves = {name.removeprefix("manifest."): value for name, value in facts.items() if name.startswith("manifest.")}
    chosen = {name: value for name, value in leaves.items() if f"{name}.".startswith(FINGERPRINT) and pd.notna(value)}
    return {name: text(value) for name, value in chosen.items()}


def curve_hash(rows: pd.DataFrame) -> str:
    """sha256 over step and exact value of every train_loss and val_loss row of a run."""
    losses = rows[rows["metric"].isin(["train_loss", "val_loss"])].sort_values(["metric", "step"])
    lines = (f"{row.metric} {row.step} {row.value.hex()}\n" for row in losses.itertuples())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_baseline(path: Path) -> dict[tuple[str, int], dict]:
    """(arm, seed) -> entry. Raises UserError, saying why, when the file is no usable baseline."""
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise UserError(
                f"{path}: a baseline of version {document['version']}, and this hqsweep reads version {VERSION}; "
                "store it anew with --update"
            )
        entries = {(entry["arm"], entry["seed"]): entry for entry in document["runs"]}
        for entry in entries.values():
            float.fromhex(entry["final_loss"]), entry["curve_sha256"], entry["run_id"], entry["fingerprint"]
        return entries
    except FileNotFoundError:
        raise UserError(f"{path}: there is no baseline file; store one with --update") from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: not a baseline file ({type(error).__name__}: {error}); store one with --update"
        ) from None


def _judge(arm: str, runs: pd.DataFrame, now: dict, stored: dict, max_gap: float) -> Verdict:
    kept = {seed for name, seed in stored if name == arm}
    common = [(arm, seed) for seed in sorted(kept) if (arm, seed) in now]
    gaps = [float.fromhex(now[key]["final_loss"]) - float.fromhex(stored[key]["final_loss"]) for key in common]
    gap = sum(gaps) / len(gaps) if gaps else math.nan
    bitwise = bool(common) and all(now[key]["curve_sha256"] == stored[key]["curve_sha256"] for key in common)
    broken = [f"seed {run.seed} {fault(run)}" for run in runs.itertuples() if (arm, run.seed) not in now]
    absent = [f"seed {seed} is not in this sweep" for seed in sorted(kept - set(runs["seed"]))]
    diverged = bool((runs["diverged"] & runs["seed"].isin(kept)).any())
    judged = "missing" if absent else "pass" if kept else "new"
    outcome = "regression" if gap > max_gap or diverged else "failed" if broken else judged
    notes = [*broken, *absent, *([f"gap above {max_gap:g} nats"] if gap > max_gap else [])]
    if common:
        notes.append("bitwise equal" if bitwise else _difference([(now[key], stored[key]) for key in common]))
    elif not kept:
        notes.append("not in the baseline; --update adds it")
    return Verdict(arm=arm, outcome=outcome, gap=gap, seeds=len(common), bitwise=bitwise, note="; ".join(notes))


def _difference(pairs: list[tuple[dict, dict]]) -> str:
    """Why curves may differ: another config, another machine or build, or neither."""
    if any(new["run_id"] != old["run_id"] for new, old in pairs):
        return "curves differ, and so does the config"
    changes = {
        f"{name} {old['fingerprint'].get(name)} -> {new['fingerprint'].get(name)}"
        for new, old in pairs
        for name in new["fingerprint"] | old["fingerprint"]
        if new["fingerprint"].get(name) != old["fingerprint"].get(name)
    }
    return (
        f"curves differ, and so does {', '.join(sorted(changes))}"
        if changes
        else "curves differ on an equal machine and config"
    )


def _absent(runs: pd.DataFrame, stored: dict) -> tuple[Verdict, ...]:
    missing = dict.fromkeys(arm for arm, _ in stored if arm not in set(runs["arm"]))
    return tuple(
        Verdict(
            arm=arm, outcome="missing", gap=math.nan, seeds=0, bitwise=False, note="no run of this arm in the sweep"
        )
        for arm in missing
    )


def _update(path: Path, runs: pd.DataFrame, now: dict, verdicts: tuple[Verdict, ...]) -> Verdicts:
    if len(now) < len(runs):
        holes = f"{path} was not written: {len(runs) - len(now)} of {len(runs)} runs have no final loss"
        return Verdicts(verdicts=verdicts, refused=holes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"version": VERSION, "sweeps": sorted(set(runs["sweep"])), "runs": list(now.values())})
    return Verdicts(verdicts=verdicts, written=path)
