"""The claim that a report makes of an arm: one word, and one sentence in plain words.

A difference is claimed when its p, corrected by Holm over the arms of the report, is below 5 % and it is larger than
the resolution that the null arm measured. Anything else is not resolved, and the sentence says how many seeds would be.
"""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from hqsweep.report.paired import LEVEL, MAX_SEEDS

Row = Mapping[str, Any]
"""A row of Comparison.arms, as far as it is filled in."""


def state_text(states: pd.Series) -> str:
    """ "3 finished", or "2 finished, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in states.value_counts().items())


def outcome(row: Row) -> str:
    """One word for the arm: baseline, failed (no run has a final loss), diverged (some run did), unpaired, null, one
    seed, equal, worse, better or unresolved."""
    if math.isnan(row["final_loss"]):
        return "failed"
    if row["arm"] == row["baseline"]:
        return "baseline"
    if row["diverged"]:
        return "diverged"
    if row["seeds"] == 0:
        return "unpaired"
    if row["null"]:
        return "null"
    if row["seeds"] == 1:
        return "one seed"
    if row["gap_lo"] == row["gap_hi"] == 0:
        return "equal"
    if not row["p_holm"] < LEVEL or abs(row["gap"]) <= row["resolution"]:
        return "unresolved"
    return "worse" if row["gap"] > 0 else "better"


def sentence(row: Row, unfinished: pd.DataFrame) -> str:
    """The verdict in plain words; `unfinished`, the arm's runs (of Frames.runs) without a final loss, come first."""
    faults = [f"seed {run.seed} {fault(run)}" for run in unfinished.itertuples()]
    trouble = f"{len(faults)} of {row['runs']} runs without a result: {'; '.join(faults)}. " if faults else ""
    if row["diverged"]:
        trouble += f"{row['diverged']} of {row['runs']} runs diverged, the first at {row['diverged_at']:,.0f} tokens. "
    return trouble + _finding(row)


def fault(run: Any) -> str:
    """Why a run (a row of Frames.runs) has no final loss: "failed (loss is nan at step 37)"."""
    if run.state == "finished":
        return "finished without a finite val_loss"
    return run.state + (f" ({run.reason})" if isinstance(run.reason, str) else "")


def _finding(row: Row) -> str:
    name, gap = f"'{row['baseline']}'", f"{row['gap']:+.4f}"
    match row["outcome"]:
        case "failed":
            return "No run of this arm has a final loss."
        case "baseline":
            return f"Baseline: final loss {row['final_loss']:.4f} nats."
        case "unpaired":
            return f"No finished seed in common with {name}: no gap."
        case "equal":
            return f"Equal to {name} in every digit over {row['seeds']} seeds."
        case "null":
            return f"Null arm of {name}, {gap}{_half(row)} nats{_seeds(row)}: {_resolution(row)}."
        case "diverged" if row["seeds"] == 0:
            return f"No other run has a seed in common with {name}."
        case "diverged":
            return f"The others end {gap}{_half(row)} nats from {name}{_seeds(row)}."
        case "one seed":
            side = "above" if row["gap"] > 0 else "below"
            return f"Ends {abs(row['gap']):.4f} nats {side} {name}; one seed: no interval; add seeds."
        case "unresolved":
            return f"Not resolved from {name}: {gap}{_half(row)} nats{_seeds(row)}{_why_not(row)}."
        case verdict:
            size = f"{abs(row['gap']):.4f}{_half(row)} nats ({abs(row['gap_pct']):.2f} %)"
            return (
                f"{verdict.capitalize()} than {name} by {size}{_seeds(row)}, p {_p(row['p_holm'])}; {_resolution(row)}."
            )


def _half(row: Row) -> str:
    """Half the width of the 95 % interval, nothing for one seed."""
    return "" if math.isnan(row["gap_hi"]) else f" ± {row['gap_hi'] - row['gap']:.4f}"


def _seeds(row: Row) -> str:
    return " over 1 seed" if row["seeds"] == 1 else f" over {row['seeds']} seeds"


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def _resolution(row: Row) -> str:
    if math.isnan(row["resolution"]):
        return "resolution unknown"
    return f"resolution {row['resolution']:.4f}"


def _why_not(row: Row) -> str:
    """The part of the sentence that says what a claim lacks: a gap above the resolution, or seeds."""
    below = f", within the resolution of {row['resolution']:.4f}" if abs(row["gap"]) <= row["resolution"] else ""
    needed, target = row["seeds_needed"], f"{row['target_gap']:.4f} nats"
    if needed <= row["seeds"]:
        return below + f"; these seeds would resolve {target}" * (not below)
    if math.isinf(needed):
        return f"{below}; {target} would need more than {MAX_SEEDS:,} seeds"
    return f"{below}; {needed:.0f} seeds would be needed for {target}"
