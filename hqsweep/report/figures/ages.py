"""Gap against age: forks of several ages that end together, and the line that leads from them to a whole run."""

import math

import numpy as np
import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.figures.look import Panel, gaps_against, listed, styles
from hqsweep.verdicts.judging import weights

STEPS = 17
"""The points of a drawn line."""


def age_panels(comparison: Comparison) -> list[Panel]:
    """Return the figure of the gaps against age; [] where forks do not end together."""
    end = comparison.arms["end"].iloc[0]
    rows = age_lines(comparison) if math.isfinite(end) else pd.DataFrame()
    if rows.empty:
        return []
    lines, forks = rows[rows["kind"] == "line"], rows[rows["kind"] == "fork"]
    look, hovers = styles(comparison.arms), ("age %{x:.0f}: %{y:+.4f} %", "%{text}, age %{x}")
    fig = gaps_against("age: steps since the fork", None, comparison.margin_pct, look, lines, forks, hovers)
    last = lines[lines["step"] == end]
    says = listed(f"{row.arm} {row.gap_pct:+.3f} %" for row in last.itertuples())
    heading = f"Gap against age, all forks end at step {end:,.0f}"
    return [Panel(
        heading=heading, figure=fig, name="ages", rows=rows,
        says=f"{heading}, in % of the baseline's loss. At the age of a whole run: {says}.",
    )]  # fmt: skip


def age_lines(comparison: Comparison) -> pd.DataFrame:
    """arm, kind, trunk, step (age), gap_pct, low, high: every fork (kind "fork"), and the mean line over trunks from
    age 0 to the whole run ("line") with as many standard errors around it as the verdict's interval has."""
    end, parts = comparison.arms["end"].iloc[0], []
    for arm, estimate in comparison.estimates.items():
        own = comparison.points[comparison.points["arm"] == arm]
        gaps = own.pivot_table(index="trunk", columns="point", values="gap_pct", sort=False)
        ages = end - gaps.columns.to_numpy(dtype=float)
        if len(ages) < 2:
            continue
        line, steps = weights(ages, end), np.linspace(0, end, STEPS)
        sums = gaps.to_numpy() @ (line.at_once[:, None] + line.growth[:, None] * steps)
        errors = (estimate.ci_high - estimate.gap) / estimate.se if estimate.se > 0 else np.nan
        half = errors * sums.std(axis=0, ddof=1) / len(sums) ** 0.5 if len(sums) > 1 else np.full(STEPS, np.nan)
        mean = sums.mean(axis=0)
        forks = own[["trunk", "gap_pct"]].assign(step=end - own["point"], kind="fork")
        drawn = {"step": steps, "gap_pct": mean, "low": mean - half, "high": mean + half, "kind": "line"}
        parts.append(pd.concat([forks, pd.DataFrame(drawn)]).assign(arm=arm))
    columns = ["arm", "kind", "trunk", "step", "gap_pct", "low", "high"]
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)
