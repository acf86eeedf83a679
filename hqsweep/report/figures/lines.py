"""Lines: losses with a band over seeds, gaps with their intervals, the growth of the gap of forks since they left the
trunk, and the direction of gradients as points for each layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hqsweep.report.compare.arms import Comparison, gap_curve
from hqsweep.report.compare.courses import growth_rows
from hqsweep.report.compare.frames import FORK, Frames, by_module
from hqsweep.report.figures.look import (
    BASELINE_COLOUR,
    Panel,
    faint,
    figure,
    label,
    line_with_band,
    listed,
    margin_band,
    padded,
    styles,
    symbol,
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


def loss_panels(comparison: Comparison) -> list[Panel]:
    """The validation and the training losses over steps."""
    smooth, rolling = _rolling(comparison)
    return _drawn(
        loss_curves(comparison, "Validation loss", "val_loss"),
        loss_curves(comparison, f"Training loss{rolling}", "train_loss", smooth),
    )


def gap_panels(comparison: Comparison) -> list[Panel]:
    """The gaps of whole runs over steps; [] for forks, whose gaps growth_panels draws."""
    if comparison.design == FORK:
        return []
    smooth, rolling = _rolling(comparison)
    return _drawn(
        gap_curves(comparison, "Validation gap over steps", "val_loss"),
        gap_curves(comparison, f"Training gap over steps{rolling}", "train_loss", smooth),
    )


def growth_panels(comparison: Comparison) -> list[Panel]:
    """The gaps of forks over the steps since the fork; [] for whole runs."""
    return growth_of(comparison, smoothing(comparison)) if comparison.design == FORK else []


def balance_panels(comparison: Comparison) -> list[Panel]:
    """The greatest load of any expert, and the loss that keeps loads even, over steps."""
    smooth, rolling = _rolling(comparison)
    return _drawn(
        loss_curves(comparison, f"Greatest load of any expert{rolling}", "expert_load_max", smooth, unit=""),
        loss_curves(comparison, f"Load-balance loss{rolling}", "aux_loss", smooth, unit=""),
    )


def _rolling(comparison: Comparison) -> tuple[int, str]:
    """(rows of a rolling mean, its mention in a heading)."""
    smooth = smoothing(comparison)
    return smooth, f", rolling mean of {smooth} rows" if smooth > 1 else ""


def _drawn(*panels: Panel | None) -> list[Panel]:
    return [panel for panel in panels if panel]


def loss_curves(comparison: Comparison, heading: str, metric: str, smooth: int = 1, unit: str = "nats") -> Panel | None:
    """Mean over the finished runs of each arm, with a band from the lowest to the highest seed; runs without a result
    are dotted and end in a cross. Forks: a line from the trunks' mean at every fork point on, without a band, and that
    mean. `unit` of the metric: "" for none. None where no run has two values: tables have single ones."""
    rows = _smoothed(comparison.frames, metric, smooth)
    trunks = _means(_smoothed(comparison.trunks, metric, smooth), ["step"])
    if rows.empty or (trunks.empty and rows.groupby("run").size().max() < 2):
        return None
    fig = figure(f"{metric} ({unit})" if unit else metric)
    rows = rows.join(comparison.finals.set_index("run")["point"], on="run")
    good = rows["run"].isin(comparison.finals["run"][comparison.finals["final_loss"].notna()])
    means = _means(rows[good], ["arm", "point", "step"])
    columns = ("loss", "loss", "loss") if comparison.design == FORK else ("loss", "lowest", "highest")
    if len(trunks):
        line_with_band(fig, "trunk", TRUNK_LINE, thin(trunks), ("loss", "loss", "loss"))
    for arm, line in styles(comparison.arms).items():
        line_with_band(fig, arm, line, _pieces(means[means["arm"] == arm], trunks), columns)
        for _, run in rows[(rows["arm"] == arm) & ~good].groupby("run"):
            _broken_run(fig, arm, line, run.dropna(subset="value"))
    steps = _steps_range(rows)
    fig.update_xaxes(range=steps)
    beside = trunks[trunks["step"].between(*steps)].rename(columns={"loss": "value"})
    fig.update_yaxes(range=_useful_range(pd.concat([rows, beside])))
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


def _pieces(means: pd.DataFrame, trunks: pd.DataFrame) -> pd.DataFrame:
    """One after another the lines that begin at different points, each at the trunks' last row up to its point, with a
    row of NaN between them, where a line breaks."""
    pieces = [
        pd.concat([before, thin(piece)]) if len(before := trunks[trunks["step"] <= point].tail(1)) else thin(piece)
        for point, piece in means.groupby("point")
    ]
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
    for arm, line in styles(comparison.arms).items():
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


def _steps_range(rows: pd.DataFrame) -> list[float]:
    """The steps from the start of the runs to the last row, with room at both ends; of forks from a third of their
    length before the first."""
    points = rows["point"].dropna()
    first, last = points.min() if len(points) else rows["step"].min(), rows["step"].max()
    first = max(first - (last - first) / 3, 0) if first else first
    room = max((last - first) * 0.04, 1)
    return [float(first - room), float(last + room)]


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


SMALLEST = 1e-7
"""The value at which a smaller 1 - cosine is drawn: the rounding of a float32 product."""
GRADIENTS = {"dgrad": "Gradient of the input (dgrad)", "wgrad": "Gradient of the weight (wgrad)"}


def gradient_cosines(comparison: Comparison) -> list[Panel]:
    """Return figures for dgrad and wgrad with a line per layer and a marker per arm, on a logarithmic axis.

    A value is 1 - cosine between the GEMM's output and the product in FP32: the median over sampled steps, seeds, and
    experts of a grouped linear.
    """
    stats, look = by_module(comparison.frames.stats), styles(comparison.arms)
    stats["layer"] = stats["module"]
    outputs = stats[(stats["direction"] == "output") & stats["tensor"].isin(GRADIENTS)]
    rows = outputs.groupby(["arm", "layer", "tensor"], sort=False)["cosine"].agg(["median", "min"]).reset_index()
    rows = rows.set_axis(["arm", "layer", "gemm", "median_cosine", "lowest_cosine"], axis=1)
    layers = stats["layer"].unique()  # forward order: backward GEMMs come in the reverse
    return [
        _cosine(rows[rows["gemm"] == gemm], rows, layers, heading, look)
        for gemm, heading in GRADIENTS.items()
        if (rows["gemm"] == gemm).any()
    ]


def _cosine(
    part: pd.DataFrame, rows: pd.DataFrame, layers: Sequence[str], heading: str, look: dict[str, dict]
) -> Panel:
    layers = [label(layer) for layer in layers if layer in set(part["layer"])]
    fig = figure("", "1 - cosine", height=90 + 22 * len(layers))
    for arm, style in look.items():
        own = part[part["arm"] == arm].dropna()
        fig.add_scatter(
            x=(1 - own["median_cosine"]).clip(lower=SMALLEST),
            y=own["layer"].map(label),
            mode="markers",
            marker={"color": style["color"], "symbol": symbol(style), "size": 9},
            legendgroup=arm,
            name=label(arm),
            customdata=own["median_cosine"],
            hovertemplate="%{y}: cosine %{customdata:.6f}",
        )
    span = padded(np.log10((1 - part["median_cosine"].dropna()).clip(lower=SMALLEST).to_numpy()))
    fig.update_xaxes(
        type="log", range=span, exponentformat="power", dtick=2 if span and span[1] - span[0] > 4 else 1, tickangle=0
    )
    fig.update_yaxes(categoryorder="array", categoryarray=layers, autorange="reversed", ticks="")
    worst = part.groupby("arm", sort=False)["median_cosine"].min().items()
    says = f"{heading}: lowest cosine of any layer: {listed(f'{arm} {low:.6f}' for arm, low in worst)}."
    return Panel(heading=heading, figure=fig, name="gradient_cosine", rows=rows, says=says)


NAME = "growth"
TOGETHER = "all"
"""The fork point of the rows that are means over all points."""


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

    lines: from growth_lines. look: arm -> line style, in drawing order. margin: of the band, in %.
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
    drawn = growth(lines, styles(comparison.arms), margin=comparison.margin_pct, decay_from=decay_from)
    return [_fitted(drawn[0], comparison), *drawn[1:]] if drawn and comparison.courses else drawn


FIT = "fit"
"""The fork point of the rows of fitted curves, whose low and high are the interval of the part that lasts."""


def _fitted(panel: Panel, comparison: Comparison) -> Panel:
    """The panel with the fitted curve of every arm, dotted, and over its second half the interval of the part that
    lasts."""
    parts, said = [panel.rows], []
    for arm, style in styles(comparison.arms).items():
        steps, found = comparison.courses.get(arm, (np.empty(0), None))
        if found is None or not len(found.fitted):
            continue
        mean, low, high = found.lasting
        own = pd.DataFrame({"arm": arm, "point": FIT, "step": steps, "gap_pct": found.fitted, "low": low, "high": high})
        band = own[own["step"] >= own["step"].max() / 2].assign(gap_pct=mean)
        line = {**style, "width": 1, "dash": "dot"}
        if np.isfinite(mean):
            edges = band["low"].to_numpy(), band["high"].to_numpy()
            _band(panel.figure, arm, style, band["step"], *edges)
            said.append(f"{arm} {mean:+.3f} %")
        panel.figure.add_scatter(
            x=own["step"], y=own["gap_pct"], mode="lines", line=line, legendgroup=arm, name="",
            hovertemplate="fit, %{x} steps since the fork: %{y:+.4f} %",
        )  # fmt: skip
        parts.append(own)
    says = f"{panel.says} The part that is lasting: {listed(said)}." if said else panel.says
    return replace(panel, rows=pd.concat(parts, ignore_index=True), says=says)


def _band(fig: go.Figure, arm: str, style: dict, steps: pd.Series, low: np.ndarray, high: np.ndarray) -> None:
    edge = {"x": steps, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": arm}
    fig.add_scatter(y=high, **edge)
    fig.add_scatter(y=low, fill="tonexty", fillcolor=faint(style["color"]), **edge)


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
