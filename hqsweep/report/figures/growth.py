"""How the gap of a fork grows: the training loss of an arm minus that of the baseline on the same batches, over the
steps since both left the trunk, for every fork point apart, and for all of them together.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.figures.look import (
    BASELINE_COLOUR,
    Panel,
    figure,
    line_with_band,
    listed,
    margin_band,
    padded,
    styles,
    thin,
)

NAME = "growth"
TOGETHER = "all"
"""The fork point of the rows that are means over all points."""
KEYS = ["trunk", "seed", "point", "step"]


def growth_rows(metrics: pd.DataFrame, runs: pd.DataFrame, baseline_of: Mapping[str, str]) -> pd.DataFrame:
    """arm, trunk, seed, point, step (since the fork), gap (nats) and gap_pct (% of the baseline's loss at that step):
    one row per logged train_loss of every fork that the fork of its baseline has as well.

    metrics: run, step, metric, value. runs: run, arm, trunk, seed, point. baseline_of: arm -> its baseline.
    """
    losses = metrics.loc[metrics["metric"] == "train_loss", ["run", "step", "value"]]
    losses = losses.merge(runs[["run", "arm", "trunk", "seed", "point"]], on="run")
    losses["step"] -= losses["point"].astype("int64")
    reference = losses.rename(columns={"arm": "baseline", "value": "reference"}).drop(columns="run")
    others = losses[losses["arm"] != losses["arm"].map(baseline_of)]
    pairs = others.assign(baseline=others["arm"].map(baseline_of)).merge(reference, on=["baseline", *KEYS])
    pairs["gap"] = pairs["value"] - pairs["reference"]
    pairs["gap_pct"] = 100 * pairs["gap"] / pairs["reference"]
    rows = pairs[["arm", *KEYS, "gap", "gap_pct"]].sort_values(["arm", *KEYS], ignore_index=True)
    return rows[np.isfinite(rows["gap_pct"])]


def growth_lines(rows: pd.DataFrame, smooth: int = 1) -> pd.DataFrame:
    """arm, point (text, TOGETHER for all), step, gap_pct (mean), low, high (of the trunks) and trunks.

    A fork's gap is a rolling mean over `smooth` rows. A line of one point is the mean over trunks. The line of all
    points is the mean over points within a trunk, then over trunks, at the steps that every fork of the arm has.
    """
    forks = rows.sort_values("step").groupby(["arm", "trunk", "seed", "point"], sort=False)["gap_pct"]
    smoothed = rows.assign(gap_pct=forks.transform(lambda gaps: gaps.rolling(smooth, min_periods=1).mean()))
    apart = smoothed.groupby(["arm", "point", "step", "trunk"], sort=False)["gap_pct"].mean().reset_index()
    forks_there = apart.groupby(["arm", "step"])["gap_pct"].transform("size")
    whole = apart[forks_there == apart["arm"].map(apart.groupby(["arm", "step"]).size().groupby("arm").max())]
    together = (
        whole.groupby(["arm", "step", "trunk"], sort=False)["gap_pct"].mean().reset_index().assign(point=TOGETHER)
    )
    both = pd.concat([together, apart.assign(point=apart["point"].map("{:.0f}".format))])
    lines = both.groupby(["arm", "point", "step"], sort=False)["gap_pct"].agg(["mean", "min", "max", "size"])
    return lines.reset_index().set_axis(["arm", "point", "step", "gap_pct", "low", "high", "trunks"], axis=1)


def growth(
    lines: pd.DataFrame, look: Mapping[str, dict], *, margin: float, decay_from: float | None = None
) -> list[Panel]:
    """A figure of all points together, and where there are several one for each, all with one y axis.

    lines: those of growth_lines. look: arm -> line style, in the order to draw. margin: that of the band, in %.
    decay_from: the step since the fork after which the learning rate falls, None for unknown.
    """
    if lines.empty:
        return []
    points = [point for point in lines["point"].unique() if point != TOGETHER]
    span = _range(lines, margin)
    shown = [TOGETHER, *points] if len(points) > 1 else points
    return [_panel(lines, point, look, span, margin, decay_from) for point in shown]


def growth_of(comparison: Comparison, smooth: int) -> list[Panel]:
    """The figures for the forks of a comparison that finished."""
    runs, finals = comparison.frames.runs, comparison.finals
    done = runs[runs["run"].isin(finals["run"][finals["final_loss"].notna()])]
    lines = growth_lines(growth_rows(comparison.frames.metrics, done, comparison.baseline_of), smooth)
    steps = runs["config.fork.steps"].unique()
    decay_from = float(steps[0]) if len(steps) == 1 else None
    return growth(lines, styles(comparison), margin=comparison.margin_pct, decay_from=decay_from)


def _panel(
    lines: pd.DataFrame,
    point: str,
    look: Mapping[str, dict],
    span: list[float] | None,
    margin: float,
    decay_from: float | None,
) -> Panel:
    own = lines[lines["point"] == point].sort_values("step")
    where = "all fork points together" if point == TOGETHER else f"forks at step {int(point):,}"
    heading = f"Growth of the training gap: {where}"
    fig = figure("gap, % of the baseline's loss", "steps since the fork", y={"range": span, "tickformat": "+.4~g"})
    margin_band(fig, margin)
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    if decay_from is not None:
        fig.add_vline(x=decay_from, line={"color": "#888", "width": 1, "dash": "dot"})
        note = {"x": decay_from, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "top", "showarrow": False}
        fig.add_annotation(text="decay", font={"size": 12, "color": "#555"}, **note)
    for arm, style in look.items():
        hover = "%{x} steps since the fork: %{y:+.4f} %"
        line_with_band(fig, arm, style, thin(own[own["arm"] == arm]), ("gap_pct", "low", "high"), hover)
    ends = own.groupby("arm", sort=False).last()
    says = listed(f"{arm} {row.gap_pct:+.3f} %" for arm, row in ends.iterrows())
    return Panel(
        heading=heading,
        figure=fig,
        name=NAME,
        rows=lines,
        says=f"{heading}, in % of the baseline's loss over the steps since the fork. At the last step: {says}.",
        zoomed=True,
    )


def _range(lines: pd.DataFrame, margin: float) -> list[float] | None:
    """The range of the y axis, one for all points, so that their figures can be compared; the first steps, which have
    few rows, do not count."""
    settled = lines[lines["step"] > 0.05 * lines["step"].max()]
    values = settled[["gap_pct", "low", "high"]].to_numpy(dtype=float)
    return padded(np.append(values, [margin, -margin]))
