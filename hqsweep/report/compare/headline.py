"""The verdict of a whole study in one sentence, with which every report begins."""

from typing import Any

import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.identical import IDENTICAL
from hqsweep.report.compare.verdict import digits, identity
from hqsweep.verdicts.estimate import VERDICTS

NAMED = 4
"""Arms of one verdict that are named; of more than these the number, the first and the last."""


def headline(comparison: Comparison) -> str:
    """Which arms are equivalent, better, worse and undecided, which have no verdict, and what the null arm says:
    "mxfp8 (+0.05 %) is equivalent to bf16 within 0.25 %; nvfp4 (+1.06 %) is worse; the null arm is equivalent, as it
    must be."."""
    arms = comparison.arms[comparison.arms["arm"] != comparison.arms["baseline"]].sort_values("gap_pct", kind="stable")
    tested, null = arms[~arms["null"]], arms[arms["null"]]
    margin, inside = f"{comparison.margin_pct:g} %", tested["within_margin"]
    said = {
        f"equivalent to {comparison.baseline} within {margin}": tested["verdict"] == "equivalent",
        f"better than {comparison.baseline}": (tested["verdict"] == "better") & ~inside,
        f"better, inside the margin of {margin}": (tested["verdict"] == "better") & inside,
        f"worse than {comparison.baseline}": (tested["verdict"] == "worse") & ~inside,
        f"worse, inside the margin of {margin}": (tested["verdict"] == "worse") & inside,
        "undecided": tested["verdict"] == "undecided",
    }
    parts = [_clause(tested[which], f"is {words}", f"are {words}") for words, which in said.items() if which.any()]
    same = tested["verdict"] == IDENTICAL
    for words, rows in tested[same].groupby(tested.apply(identity, axis=1), sort=False):
        parts.append(_clause(rows, f"is {words}", f"are {words}"))
    for why, rows in tested[~same & ~tested["verdict"].isin(VERDICTS)].groupby("verdict", sort=False):
        parts.append(_clause(rows, f"has no verdict ({why})", f"have no verdict ({why})"))
    if arms["null_in_doubt"].any():
        parts.append("the null arm is not shown equivalent, so that the machinery is in doubt")
    elif len(null) and null["within_margin"].all():
        parts.append("the null arm is equivalent, as it must be")
    if count := len(comparison.left_out):
        parts.append(f"{count} run{'s are' if count > 1 else ' is'} left out")
    return ("; ".join(parts) or f"No arm stands beside {comparison.baseline}") + "."


def _clause(rows: pd.DataFrame, one: str, several: str) -> str:
    names = [_with_gap(row) for row in rows.itertuples()]
    if len(names) == 1:
        return f"{names[0]} {one}"
    if len(names) > NAMED:
        return f"{len(names)} arms, from {names[0]} to {names[-1]}, {several}"
    return f"{', '.join(names[:-1])} and {names[-1]} {several}"


def _with_gap(row: Any) -> str:
    if pd.isna(row.gap_pct) or row.verdict == IDENTICAL:
        return row.arm
    return f"{row.arm} ({row.gap_pct:+.{digits(row.half_pct)}f} %)"
