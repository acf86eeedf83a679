"""The gate for CI: this sweep against a stored baseline (baseline.py).

Runs are paired by arm and seed, so the seed's own spread cancels. Where config and machine are those of the baseline,
curves must be equal bit for bit. Elsewhere the mean gap to the stored losses is judged against max_gap:

    regression     gap > max_gap is proven: one-sided p, corrected by Holm over the arms, below 2.5 %, so that at most
                   this share of sweeps whose true gaps are max_gap has a false alarm in any arm
    pass           the 95 % interval of the gap ends at or below max_gap
    inconclusive   neither, as with one seed
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from hqsweep.errors import EXIT_FAILED, EXIT_MISMATCH, EXIT_UNDECIDED, UserError
from hqsweep.report.baseline import EQUAL, UPDATE, Entries, Entry, comparable, difference, gap, measure, read_baseline
from hqsweep.report.frames import load
from hqsweep.report.paired import LEVEL, holm, interval, p_value, seeds_needed
from hqsweep.report.text import TextTable, number, to_rich
from hqsweep.report.verdict import fault
from hqsweep.sweep.store import RunDir

ALARM_LEVEL = LEVEL / 2
STYLE = {"pass": "green", "new": "yellow", "inconclusive": "yellow"}
EXIT_CODES = {
    "pass": 0, "regression": EXIT_MISMATCH, "failed": EXIT_FAILED, "inconclusive": EXIT_UNDECIDED,
    "no baseline": EXIT_UNDECIDED,
}  # fmt: skip
JUNIT = {"pass": "PASS", "new": "PASS", "inconclusive": "SKIP"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One arm: `outcome` is pass, regression, inconclusive, failed, missing (a stored run is not in the sweep) or new
    (the arm is not in the baseline). `gap` is the mean of this sweep's final val_loss minus the stored one in nats over
    `seeds` common seeds, from `low` to `high` its 95 % interval (NaN for none); `bitwise` says that all of the common
    runs' curves are equal."""

    arm: str
    outcome: str
    gap: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0
    bitwise: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All arms; `problem` says why there is no usable baseline."""

    verdicts: tuple[Verdict, ...] = field(default=())
    problem: str | None = None

    @property
    def outcome(self) -> str:
        """The sweep in one word: no baseline, regression, failed, inconclusive or pass, the worst first."""
        outcomes = {verdict.outcome for verdict in self.verdicts}
        if self.problem:
            return "no baseline"
        if "regression" in outcomes:
            return "regression"
        if outcomes & {"failed", "missing"}:
            return "failed"
        return "inconclusive" if "inconclusive" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        """0 all good; 1 a regression; 3 a failed or missing run; 4 no baseline, or one with too few seeds to decide."""
        return EXIT_CODES[self.outcome]

    def rows(self) -> list[dict[str, Any]]:
        """The arms, and the problem if there is one, as rows for junit.write."""
        cases = [(verdict.arm, JUNIT.get(verdict.outcome, "FAIL"), verdict.note) for verdict in self.verdicts]
        cases += [("baseline", "FAIL", self.problem)] if self.problem else []
        return [{"check": "gate", "case": case, "status": status, "note": note} for case, status, note in cases]

    def cells(self) -> TextTable:
        """The arms, for a terminal and for a job summary."""
        rows = tuple(
            (
                v.arm,
                v.outcome,
                number(v.gap, "+.6f"),
                number(v.low, "+.6f"),
                number(v.high, "+.6f"),
                str(v.seeds),
                v.note,
            )
            for v in self.verdicts
        )
        header = ("arm", "verdict", "gap (nats)", "95 % from", "to", "seeds", "note")
        return TextTable(header=header, rows=rows, numeric=frozenset({2, 3, 4, 5}))

    def table(self) -> Table:
        """The arms for a terminal."""
        styles = [STYLE.get(verdict.outcome, "red") for verdict in self.verdicts]
        return to_rich(self.cells(), f"gate: {self.outcome}", styles)


def gate(run_dirs: Iterable[RunDir], baseline_file: Path, max_gap: float = 0.01) -> Verdicts:
    """Judge each arm. A run that the baseline has and that now diverges is a regression too. Raises UserError for no
    convergence run, or max_gap < 0."""
    if not max_gap >= 0:
        raise UserError(f"max_gap: {max_gap} nats; give 0 (no loss may rise) or more")
    frames = load(run_dirs).of_job("convergence")
    now = measure(frames)
    try:
        stored, problem = read_baseline(baseline_file), None
    except UserError as error:
        stored, problem = {}, str(error)
    arms = dict.fromkeys([*frames.runs["arm"], *(arm for arm, _ in stored)])
    pairs = {
        arm: [(now[key], old) for key, old in sorted(stored.items()) if key[0] == arm and key in now] for arm in arms
    }
    unequal = {arm: common for arm, common in pairs.items() if difference(common) != EQUAL}
    decided = decide({arm: [gap(*pair) for pair in common] for arm, common in unequal.items()}, max_gap)
    verdicts = tuple(
        _judge(arm, frames.runs[frames.runs["arm"] == arm], now, stored, common, decided, max_gap)
        for arm, common in pairs.items()
    )
    if problem is None and not {arm for arm, _ in stored} & set(frames.runs["arm"]):
        known = dict.fromkeys(arm for arm, _ in stored)
        problem = f"{baseline_file}: no arm in common with these runs (its arms: {', '.join(known)})"
    return Verdicts(verdicts=verdicts, problem=problem)


def decide(gaps: Mapping[str, Sequence[float]], max_gap: float) -> dict[str, str]:
    """Arm -> regression, pass or inconclusive, from the gaps (nats) of its seeds; the module says by which rule."""
    corrected = holm({arm: _p_above(values, max_gap) for arm, values in gaps.items()})
    decided = {}
    for arm, values in gaps.items():
        below = interval(values)[2] <= max_gap
        decided[arm] = "regression" if corrected[arm] < ALARM_LEVEL else "pass" if below else "inconclusive"
    return decided


def _p_above(values: Sequence[float], against: float) -> float:
    """One-sided p of the mean being at most `against`; NaN for fewer than two values."""
    p = p_value(values, against)
    return p / 2 if not math.isnan(p) and np.mean(values) > against else 1 - p / 2


def _judge(
    arm: str,
    runs: pd.DataFrame,
    now: Entries,
    stored: Entries,
    pairs: Sequence[tuple[Entry, Entry]],
    decided: Mapping[str, str],
    max_gap: float,
) -> Verdict:
    """The verdict on one arm; `runs` are its rows of frames.runs, `pairs` its (new, stored) entries, `decided` what the
    gaps say of the arms that are not bitwise equal."""
    stored_seeds = {seed for name, seed in stored if name == arm}
    bitwise = bool(pairs) and arm not in decided
    changed = any(comparable(new, old) and new["curve_sha256"] != old["curve_sha256"] for new, old in pairs)
    broken = [f"seed {run.seed} {fault(run)}" for run in runs.itertuples() if (arm, run.seed) not in now]
    absent = [f"seed {seed} is not in this sweep" for seed in sorted(stored_seeds - set(runs["seed"]))]
    diverged = bool((runs["diverged"] & runs["seed"].isin(stored_seeds)).any())
    judged = "regression" if changed else decided.get(arm, "pass") if stored_seeds else "new"
    if diverged or judged == "regression":
        outcome = "regression"
    else:
        outcome = "failed" if broken else "missing" if absent else judged
    gaps = [gap(*pair) for pair in pairs]
    notes = [*broken, *absent] if len(runs) else ["no run of this arm in the sweep"]
    if pairs:
        notes += [difference(pairs), *([] if bitwise or changed else [_reason(judged, gaps, max_gap, len(decided))])]
    elif not stored_seeds:
        notes.append(f"not in the baseline; `{UPDATE}` adds it")
    mean, low, high = interval(gaps)
    return Verdict(
        arm=arm, outcome=outcome, gap=mean, low=low, high=high, seeds=len(pairs), bitwise=bitwise, note="; ".join(notes)
    )


def _reason(judged: str, gaps: Sequence[float], max_gap: float, tests: int) -> str:
    """Whether the gaps are above max_gap, or the seeds that would be needed to tell."""
    if judged != "inconclusive":
        return f"gap {'above' if judged == 'regression' else 'not above'} {max_gap:g} nats"
    sd, off = float(np.std(gaps, ddof=1)) if len(gaps) > 1 else math.nan, np.mean(gaps) - max_gap
    needed = seeds_needed(sd, off, tests)
    more = "more seeds" if math.isnan(needed) else f"{needed:.0f} seeds" if math.isfinite(needed) else "too many seeds"
    return f"{more} would be needed to tell it from {max_gap:g} nats"
