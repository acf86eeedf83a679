"""The figures of a judgement: the forest plot, the metric over steps, and the paired gap over steps."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from hqsweep.foreign_logs.curves import means
from hqsweep.foreign_logs.judge import Judgement
from hqsweep.report.compare.curves import intervals
from hqsweep.report.compare.frames import FORK
from hqsweep.report.figures.forest import Forest, Gaps, forest
from hqsweep.report.figures.look import (
    BASELINE_COLOUR,
    Panel,
    figure,
    label,
    line_with_band,
    listed,
    margin_band,
    padded,
    styles,
    thin,
)

FIRST = 0.05
"""The share of the steps, the first ones, that do not set the range of an axis."""


def forest_of(judgement: Judgement) -> Forest | None:
    """The forest plot; None where no arm has a gap."""
    arms = judgement.arms[judgement.arms["arm"] != judgement.baseline]
    colours = {arm: style["color"] for arm, style in styles(judgement.arms).items()}
    relative = judgement.unit == "%"
    axis = f"gap in % of the mean of {judgement.baseline}" if relative else f"gap in {judgement.metric}"
    heading = f"Gap of {judgement.metric} to {judgement.baseline}" + ", in % of its mean" * relative
    gaps = Gaps(axis=axis, unit=" %" if relative else "", lower=judgement.lower)
    replicate = "trunk" if judgement.design == FORK else "seed"
    return forest(arms, judgement.gaps, colours, heading=heading, replicate=replicate, gaps=gaps)


def panels(judgement: Judgement) -> list[Panel]:
    """The figures over steps; [] for a log without steps."""
    rows = judgement.curves
    if rows["step"].nunique() < 2:
        return []
    drawn = (_metric(judgement, rows), _gap(judgement, rows))
    return [panel for panel in drawn if panel]


def _metric(judgement: Judgement, rows: pd.DataFrame) -> Panel | None:
    """The mean over the runs of each arm, with a band from the lowest to the highest."""
    look, name = styles(judgement.arms), judgement.metric
    shown = means(rows, list(look))
    if shown.empty:
        return None
    fig = figure(label(name))
    for arm, line in look.items():
        line_with_band(fig, arm, line, thin(shown[shown["arm"] == arm]), ("mean", "lowest", "highest"))
    late = shown[shown["step"] >= shown["step"].min() + FIRST * np.ptp(shown["step"])]
    fig.update_yaxes(range=padded(late[["lowest", "highest"]].to_numpy()))
    says = f"{name} over steps. {_ends(shown, 'mean')}"
    return Panel(heading=f"{name} over steps", figure=fig, name="metric", rows=shown, says=says, zoomed=True)


def _gap(judgement: Judgement, rows: pd.DataFrame) -> Panel | None:
    """The gap to the baseline's run of the same seed, or fork: its mean and 95 % interval over seeds or trunks."""
    look, baseline = styles(judgement.arms), judgement.baseline
    shown = paired(rows, baseline)
    if shown.empty:
        return None
    fig = figure(f"gap of {label(judgement.metric)}")
    margin_band(fig, _margin(judgement))
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    for arm, line in look.items():
        line_with_band(fig, arm, line, thin(shown[shown["arm"] == arm]), ("gap", "low", "high"))
    late = shown[shown["step"] >= shown["step"].min() + FIRST * np.ptp(shown["step"])]
    fig.update_yaxes(range=padded(late[["gap", "low", "high"]].to_numpy()), tickformat="+.4~g")
    heading = f"Paired gap of {judgement.metric} over steps"
    says = f"{heading}: the arm minus '{baseline}', with 95 % intervals. {_ends(shown, 'gap')}"
    return Panel(heading=heading, figure=fig, name="metric_gap", rows=shown, says=says, zoomed=True)


def paired(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """arm, step, gap (mean over seeds or trunks), low, high (the arm's own 95 % interval) and n, at the steps that
    both runs of a pair have."""
    keys = ["replicate", "draw", "step"]
    finite = rows[np.isfinite(rows["value"])]
    reference = finite[finite["arm"] == baseline].rename(columns={"value": "reference"}).drop(columns="arm")
    both = finite[finite["arm"] != baseline].merge(reference, on=keys)
    both["gap"] = both["value"] - both["reference"]
    single = both.groupby(["arm", "step", "replicate"], sort=False)["gap"].mean()
    frame = intervals(single.groupby(["arm", "step"])).reset_index().rename(columns={"mean": "gap"})
    most = frame.groupby("arm")["n"].transform("max")
    return frame[frame["n"] == most].reset_index(drop=True)


def _margin(judgement: Judgement) -> float:
    """The margin in the metric's unit."""
    if judgement.unit != "%":
        return judgement.margin
    return judgement.margin / 100 * abs(float(judgement.arms["mean"].iloc[0]))


def _ends(rows: pd.DataFrame, column: str) -> str:
    last: Mapping[str, float] = rows.groupby("arm", sort=False)[column].last().to_dict()
    return "At the last step: " + listed(f"{arm} {value:.5g}" for arm, value in last.items()) + "."
