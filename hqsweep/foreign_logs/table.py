"""A judgement as text: the table of arms, and below it a sentence for each."""

import math
from typing import Any

from rich.text import Text

from hqsweep.foreign_logs.judge import Judgement
from hqsweep.foreign_logs.values import several
from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.verdict import spec
from hqsweep.report.gate.ci import JUNIT
from hqsweep.report.pages.tables import COLOUR
from hqsweep.report.pages.text import Fitted, TextTable, number, to_rich

MEAN = "#.6g"
"""The format of the mean of the metric."""
DROP = ("p", "90 % interval")
"""The headings that a narrow terminal goes without, the first one first."""


def title(judgement: Judgement) -> str:
    """A line such as: val_acc (higher is better), 3 arms against bf16, margin 0.25 % of its mean."""
    better = f"{'lower' if judgement.lower else 'higher'} is better"
    arms = len(judgement.arms) - 1
    margin = f"{judgement.margin:g}" + (" % of its mean" if judgement.unit == "%" else "")
    return f"{judgement.metric} ({better}), {arms} arm{'s' * (arms > 1)} against {judgement.baseline}, margin {margin}"


def headline(judgement: Judgement) -> str:
    """The arms by verdict, in one sentence."""
    rows = judgement.arms.iloc[1:]
    by_verdict = {verdict: several(list(own["arm"])) for verdict, own in rows.groupby("verdict", sort=False)}
    said = "; ".join(f"{verdict}: {arms}" for verdict, arms in by_verdict.items())
    return f"Against {judgement.baseline}, by {judgement.metric}: {said}."


def arms_table(judgement: Judgement) -> TextTable:
    """One row per arm, the baseline first, then by gap."""
    unit = "trunks" if judgement.design == FORK else "seeds"
    gap = "gap %" if judgement.unit == "%" else "gap"
    header = ("arm", "verdict", gap, "95 % interval", "90 % interval", "p", unit, f"more {unit}", "mean")
    rows = tuple(_cells(row) for row in judgement.arms.to_dict("records"))
    return TextTable(header=header, rows=rows, numeric=frozenset(range(2, len(header))))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    inside = row["verdict"] in ("worse", "better") and row["within_margin"]
    places = spec(row, row["half_pct"])
    more = row["more"] if math.isfinite(row["more"]) else math.nan
    return (
        row["arm"],
        row["verdict"] + " (in margin)" * inside,
        number(row["gap_pct"], places),
        _span(row["ci_low_pct"], row["ci_high_pct"], places),
        _span(row["eq_low_pct"], row["eq_high_pct"], places),
        number(row["p"], ".2g"),
        str(row["n"]) if row["n"] else "-",
        number(more, "+.0f"),
        number(row["mean"], MEAN),
    )


def _span(low: float, high: float, places: str) -> str:
    return "-" if math.isnan(low) else f"{low:{places}} to {high:{places}}"


def rich_table(judgement: Judgement) -> Fitted:
    """The arms for a terminal, coloured by verdict; the caption has a sentence for each, then the runs left out."""
    styles = [COLOUR.get(verdict, "") for verdict in judgement.arms["verdict"]]
    table = to_rich(arms_table(judgement), title(judgement), styles, DROP)
    sentences = [f"{row.arm}: {row.sentence}" for row in judgement.arms.itertuples()]
    left_out = [f"Left out: {text}" for text in judgement.left_out]
    table.caption = Text("\n".join([*sentences, *left_out, *judgement.notes]))
    return table


def verdict_rows(judgement: Judgement) -> list[dict[str, Any]]:
    """A row for each arm but the baseline, for write_junit: as `hqsweep compare` has them."""
    return [
        {
            "check": "verdict",
            "case": row.arm,
            "status": "PASS" if row.within_margin else JUNIT.get(row.verdict, "FAIL"),
            "note": row.sentence,
        }
        for row in judgement.arms.iloc[1:].itertuples()
    ]
