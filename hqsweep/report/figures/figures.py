"""Lines over steps: losses with a band over seeds, and gaps with their intervals. Each function takes a Comparison and
returns a Panel, or None when there is nothing to draw.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hqsweep.report.compare.arms import Comparison, gap_curve
from hqsweep.report.compare.frames import FORK, Frames
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

TRUNK_LINE = {"color": "#999999", "width": 4, "dash": "solid"}
SETTLED = 0.1
"""The share of the steps, the first ones, whose gaps do not set the range of the axis."""


def smoothing(comparison: Comparison) -> int:
    """Rows in the rolling mean of train_loss curves: a fortieth of the longest run."""
    rows = comparison.frames.metrics
    counts = rows[rows["metric"] == "train_loss"].groupby("run").size()
    return max(1, int(counts.max()) // 40) if len(counts) else 1


def loss_curves(comparison: Comparison, heading: str, metric: str, smooth: int = 1, unit: str = "nats") -> Panel | None:
    """Mean over the finished runs of each arm, with a band from the lowest to the highest seed; runs without a result
    are dotted and end in a cross. Forks: a line from every fork point, without a band, and the trunks' mean. `unit` of
    the metric: "" for none."""
    rows = _smoothed(comparison.frames, metric, smooth)
    if rows.empty:
        return None
    fig = figure(f"{metric} ({unit})" if unit else metric)
    rows = rows.join(comparison.finals.set_index("run")["point"], on="run")
    good = rows["run"].isin(comparison.finals["run"][comparison.finals["final_loss"].notna()])
    means = _means(rows[good], ["arm", "point", "step"])
    columns = ("loss", "loss", "loss") if comparison.design == FORK else ("loss", "lowest", "highest")
    trunks = _means(_smoothed(comparison.trunks, metric, smooth), ["step"])
    if len(trunks):
        line_with_band(fig, "trunk", TRUNK_LINE, thin(trunks), ("loss", "loss", "loss"))
    for arm, line in styles(comparison).items():
        line_with_band(fig, arm, line, _pieces(means[means["arm"] == arm]), columns)
        for _, run in rows[(rows["arm"] == arm) & ~good].groupby("run"):
            _broken_run(fig, arm, line, run.dropna(subset="value"))
    fig.update_yaxes(range=_useful_range(rows))
    broken = rows[~good].rename(columns={"value": "loss", "seed": "broken_seed"})
    drawn = [means, broken[["arm", "point", "step", "loss", "broken_seed"]], trunks.assign(arm="trunk")]
    says = f"{heading}{f' in {unit}' if unit else ''} over steps. {_ends(means, 'loss', '.4f')}"
    return Panel(
        heading=heading,
        figure=fig,
        name=metric,
        rows=pd.concat([part for part in drawn if len(part)], ignore_index=True),
        says=says,
        zoomed=True,
    )


def _means(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """`keys`, then loss (mean over runs), lowest, highest, and seeds (their number)."""
    means = rows.groupby(keys, sort=False)["value"].agg(["mean", "min", "max", "count"]).reset_index()
    return means.set_axis([*keys, "loss", "lowest", "highest", "seeds"], axis=1)


def _pieces(means: pd.DataFrame) -> pd.DataFrame:
    """One after another the lines that begin at different points, a row of NaN between them, where a line breaks."""
    pieces = [thin(piece) for _, piece in means.groupby("point")]
    gap = means.iloc[:1].assign(step=np.nan, loss=np.nan, lowest=np.nan, highest=np.nan)
    parts = [part for piece in pieces for part in (gap, piece)][1:]
    return pd.concat(parts) if parts else means


def gap_curves(comparison: Comparison, heading: str, metric: str, smooth: int = 1) -> Panel | None:
    """Paired gap to the baseline at each step: mean over seeds, with its 95 % interval as a band. The band around 0 is
    the margin, in nats of the baseline's final loss."""
    rows = gap_curve(comparison, metric, smooth)
    if rows.empty:
        return None
    fig = figure(f"{metric} gap (nats)")
    baselines = comparison.arms["arm"] == comparison.arms["baseline"]
    margin_band(fig, comparison.margin_pct / 100 * comparison.arms["final_loss"][baselines].mean())
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    for arm, line in styles(comparison).items():
        line_with_band(fig, arm, line, thin(rows[rows["arm"] == arm]), ("gap", "low", "high"))
    settled = rows[rows["step"] > rows["step"].max() * SETTLED]
    fig.update_yaxes(range=padded(settled[["gap", "low", "high"]].to_numpy()), tickformat="+.4~g")
    says = (
        f"{heading}: the arm minus '{comparison.baseline}' in nats, with 95 % intervals. {_ends(rows, 'gap', '+.4f')}"
    )
    return Panel(heading=heading, figure=fig, name=f"{metric}_gap", rows=rows, says=says, zoomed=True)


def _ends(rows: pd.DataFrame, column: str, spec: str) -> str:
    last = rows.groupby("arm", sort=False).last()
    return "At the last step: " + listed(f"{arm} {value:{spec}}" for arm, value in last[column].items()) + "."


def _useful_range(rows: pd.DataFrame) -> list[float] | None:
    """Leaves out the first twentieth of the steps, whose fall would flatten all the rest."""
    return padded(rows[rows["step"] >= rows["step"].max() * 0.05]["value"].to_numpy())


def _smoothed(frames: Frames, metric: str, smooth: int) -> pd.DataFrame:
    rows = frames.metrics
    rows = rows[rows["metric"] == metric].sort_values(["run", "step"])
    mean = rows.groupby("run")["value"].transform(lambda values: values.rolling(smooth, min_periods=1).mean())
    return rows.assign(value=mean.where(np.isfinite(rows["value"])))


def _broken_run(fig: go.Figure, arm: str, line: dict, rows: pd.DataFrame) -> None:
    """A run without a result: a thin dotted line and a cross where it stopped."""
    if rows.empty:
        return
    name = f"{label(arm)} (seed {rows['seed'].iloc[0]}, no result)"
    fig.add_scatter(
        x=thin(rows)["step"],
        y=thin(rows)["value"],
        mode="lines",
        line={**line, "width": 1, "dash": "dot"},
        name=name,
        legendgroup=arm,
        hovertemplate="step %{x}: %{y:.5f}",
    )
    fig.add_scatter(
        x=rows["step"].iloc[-1:],
        y=rows["value"].iloc[-1:],
        mode="markers",
        marker={"symbol": "x", "size": 10, "color": line["color"]},
        name=name,
        legendgroup=arm,
        hovertemplate="stopped at step %{x}",
    )
