"""The plotly figures of the report. Each function takes a Comparison and returns a Figure, or None when there is
nothing to draw.

Colours are Okabe and Ito's (safe for colour-blind readers), black for the baseline; past seven arms the dash changes.
Labels are escaped, because plotly reads HTML in them.
"""

import html
import itertools
from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hqsweep.report.arms import Comparison, gap_curve

BASELINE_COLOUR = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot")
SHORT = {"grad_output": "grad", "rowwise": "row", "columnwise": "col"}
MAX_POINTS = 400  # per line: more cannot be seen and make the file large


def label(name: str) -> str:
    """A name as plotly must get it to show it as it is."""
    return html.escape(name, quote=False)


def styles(comparison: Comparison) -> dict[str, dict]:
    """arm -> line style, the same in every figure."""
    looks = itertools.cycle({"color": colour, "dash": dash} for dash in DASHES for colour in COLOURS)
    black = ({"color": BASELINE_COLOUR, "dash": dash} for dash in itertools.cycle(DASHES))
    return {
        row.arm: {"width": 2, **next(black if row.arm == row.baseline else looks)}
        for row in comparison.arms[["arm", "baseline"]].itertuples()
    }


def smoothing(comparison: Comparison) -> int:
    """Rows in the rolling mean of train_loss curves: a fortieth of the longest run."""
    rows = comparison.frames.metrics
    counts = rows[rows["metric"] == "train_loss"].groupby("run").size()
    return max(1, int(counts.max()) // 40) if len(counts) else 1


def figure(y_title: str, x_title: str = "step", height: int = 380) -> go.Figure:
    """An empty figure in the report's look: white, one thin grid, legend below."""
    fig = go.Figure()
    fig.update_layout(
        template="none", height=height, margin={"l": 56, "r": 12, "t": 12, "b": 44}, hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "font": {"size": 12}},
    )  # fmt: skip
    look = {"gridcolor": "#e6e6e6", "zeroline": False, "linecolor": "#888", "tickcolor": "#888", "ticks": "outside"}
    fig.update_xaxes(title={"text": x_title, "standoff": 8}, automargin=True, **look)
    fig.update_yaxes(title={"text": y_title, "standoff": 8}, automargin=True, **look)
    return fig


def loss_curves(comparison: Comparison, metric: str, smooth: int = 1) -> go.Figure | None:
    """Mean over the finished seeds of each arm, with a band from the lowest to the highest seed; runs without a
    result are dotted and end in a cross."""
    rows = _smoothed(comparison, metric, smooth)
    if rows.empty:
        return None
    fig = figure(f"{metric} (nats)")
    finished = set(comparison.finals[comparison.finals["final_loss"].notna()]["run"])
    for arm, line in styles(comparison).items():
        part = rows[rows["arm"] == arm]
        good = part[part["run"].isin(finished)].groupby("step")["value"].agg(["mean", "min", "max"]).reset_index()
        _line_with_band(fig, arm, line, thin(good), ("mean", "min", "max"))
        for _, run in part[~part["run"].isin(finished)].groupby("run"):
            _broken_run(fig, arm, line, run.dropna(subset="value"), alone=good.empty)
    fig.update_yaxes(range=_useful_range(rows))
    return fig


def gap_curves(comparison: Comparison, metric: str, smooth: int = 1) -> go.Figure | None:
    """Paired gap to the baseline at each step: mean over seeds, with its 95 % interval as a band."""
    rows = gap_curve(comparison, metric, smooth)
    if rows.empty:
        return None
    fig = figure(f"{metric} gap (nats)")
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    for arm, line in styles(comparison).items():
        _line_with_band(fig, arm, line, thin(rows[rows["arm"] == arm]), ("gap", "low", "high"))
    settled = rows[rows["step"] > rows["step"].max() * 0.1]
    fig.update_yaxes(range=padded(settled[["gap", "low", "high"]].to_numpy()), tickformat="+.3~f")
    return fig


def final_gaps(comparison: Comparison) -> go.Figure | None:
    """One row per arm: every seed's final gap as a dot, their mean as a diamond with its 95 % interval."""
    arms = comparison.arms[(comparison.arms["arm"] != comparison.arms["baseline"]) & (comparison.arms["seeds"] > 0)]
    if arms.empty:
        return None
    fig = figure("", "gap in final val_loss (nats)", height=90 + 50 * len(arms))
    fig.add_vline(x=0, line={"color": BASELINE_COLOUR, "width": 1})
    look = styles(comparison)
    for place, row in enumerate(arms.itertuples()):
        seeds = comparison.finals[(comparison.finals["arm"] == row.arm) & comparison.finals["gap"].notna()]
        colour = look[row.arm]["color"]
        fig.add_annotation(
            text=label(row.arm), x=0, xref="paper", y=place, yshift=17, xanchor="left", showarrow=False, bgcolor="white"
        )
        fig.add_scatter(
            x=seeds["gap"], y=[place] * len(seeds), customdata=seeds["seed"],
            mode="markers", marker={"color": colour, "size": 7, "opacity": 0.45},
            hovertemplate="seed %{customdata}: %{x:+.5f} nats<extra></extra>",
        )  # fmt: skip
        bar = {"array": [row.gap_hi - row.gap], "color": colour, "thickness": 2, "width": 7}
        fig.add_scatter(
            x=[row.gap], y=[place], error_x=bar if row.seeds > 1 else None,
            mode="markers", marker={"color": colour, "size": 11, "symbol": "diamond"},
            hovertemplate=f"mean of {row.seeds}: %{{x:+.5f}} nats<extra></extra>",
        )  # fmt: skip
    fig.update_layout(showlegend=False, margin={"l": 12, "t": 4})
    fig.update_xaxes(tickformat="+.3~f", nticks=6, tickangle=0)
    fig.update_yaxes(range=[len(arms) - 0.5, -0.8], showticklabels=False, ticks="", showgrid=False)
    return fig


def sqnr_heatmaps(comparison: Comparison) -> Iterator[tuple[str, go.Figure]]:
    """(arm, figure) for each arm with statistics: median SQNR in dB over steps and seeds, layer by (tensor,
    direction), one colour scale."""
    rows = comparison.frames.stats
    rows = rows[rows["direction"] != "output"]
    medians = rows.groupby(["arm", "layer", "tensor", "direction"], sort=False)["sqnr_db"].median()
    formats = rows.groupby(["arm", "layer", "tensor", "direction"], sort=False)["format"].last()
    layers, columns = rows["layer"].unique(), pd.MultiIndex.from_frame(rows[["tensor", "direction"]].drop_duplicates())
    scale = colour_range(medians.to_numpy())
    for arm in comparison.arms["arm"]:
        if arm in medians.index.levels[0]:
            grids = (
                values[arm].unstack(["tensor", "direction"]).reindex(index=layers, columns=columns)
                for values in (medians, formats)
            )
            yield arm, heatmap(*grids, scale)


def colour_range(values: np.ndarray) -> tuple[float, float]:
    """Multiples of 5 dB around the finite values, at least 10 dB apart."""
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.array([0.0])
    low = 5 * np.floor(values.min() / 5)
    return low, max(low + 10, 5 * np.ceil(values.max() / 5))


def heatmap(grid: pd.DataFrame, formats: pd.DataFrame, scale: tuple[float, float]) -> go.Figure:
    """SQNR in dB of lines by two levels of columns; formats are shown beside a value that is pointed at."""
    values, (low, high) = grid.to_numpy(), scale
    cells = [["∞" if np.isposinf(db) else "" if np.isnan(db) else f"{db:.0f}" for db in row] for row in values]
    written = len(grid) <= 60  # more rows are too low to write in
    tall = 22 if written else 11
    fig = figure("", "", height=80 + tall * len(grid))
    fig.add_heatmap(
        z=np.clip(values, low, high), y=[label(name) for name in grid.index],
        x=[[SHORT.get(name, name) for name in names] for names in zip(*grid.columns, strict=True)],
        text=cells, texttemplate="%{text}" if written else None, textfont={"size": 12}, customdata=formats.to_numpy(),
        zmin=low, zmax=high, colorscale="Viridis", xgap=1, ygap=1, hoverongaps=False,
        showscale=not written, colorbar={"title": {"text": "dB"}, "thickness": 10, "outlinewidth": 0},
        hovertemplate="%{y}, %{x}<br>%{z:.2f} dB (%{customdata})<extra></extra>",
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    fig.update_xaxes(showgrid=False, ticks="", tickangle=0, tickfont={"size": 11}, title=None, showdividers=False)
    return fig


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """At most MAX_POINTS evenly spaced rows, the first and the last among them."""
    if len(rows) <= MAX_POINTS:
        return rows
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(int))]


def padded(values: np.ndarray) -> list[float] | None:
    """[low, high] of the finite values with 8 % of room on both sides; None when there are none."""
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    room = 0.08 * (values.max() - values.min()) or 1e-3
    return [float(values.min() - room), float(values.max() + room)]


def _useful_range(rows: pd.DataFrame) -> list[float] | None:
    """Leaves out the first twentieth of the steps, whose fall would flatten all the rest (double click shows it)."""
    return padded(rows[rows["step"] >= rows["step"].max() * 0.05]["value"].to_numpy())


def _smoothed(comparison: Comparison, metric: str, smooth: int) -> pd.DataFrame:
    rows = comparison.frames.metrics
    rows = rows[rows["metric"] == metric].sort_values(["run", "step"])
    mean = rows.groupby("run")["value"].transform(lambda values: values.rolling(smooth, min_periods=1).mean())
    return rows.assign(value=mean.where(np.isfinite(rows["value"])))


def _line_with_band(fig: go.Figure, arm: str, line: dict, rows: pd.DataFrame, columns: tuple[str, str, str]) -> None:
    """A mean line, and between low and high a band where there is more than one seed."""
    if rows.empty:
        return
    mean, low, high = columns
    if (rows[high] > rows[low]).any():
        edge = {
            "x": rows["step"],
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
            "legendgroup": arm,
        }
        fig.add_scatter(y=rows[high], **edge)
        fig.add_scatter(y=rows[low], fill="tonexty", fillcolor=_faint(line["color"]), **edge)
    fig.add_scatter(
        x=rows["step"], y=rows[mean], mode="lines+markers" if len(rows) <= 12 else "lines", line=line,
        name=label(arm), legendgroup=arm, hovertemplate="step %{x}: %{y:.5f}",
    )  # fmt: skip


def _broken_run(fig: go.Figure, arm: str, line: dict, rows: pd.DataFrame, alone: bool) -> None:
    """A run without a result: a thin dotted line and a cross where it stopped; `alone` gives it the arm's place in
    the legend."""
    if rows.empty:
        return
    name = f"{label(arm)} (seed {rows['seed'].iloc[0]}, no result)"
    fig.add_scatter(
        x=thin(rows)["step"], y=thin(rows)["value"], mode="lines", line={**line, "width": 1, "dash": "dot"}, name=name,
        legendgroup=arm, showlegend=alone, hovertemplate="step %{x}: %{y:.5f}",
    )  # fmt: skip
    fig.add_scatter(
        x=rows["step"].iloc[-1:], y=rows["value"].iloc[-1:], mode="markers",
        marker={"symbol": "x", "size": 10, "color": line["color"]}, name=name, legendgroup=arm, showlegend=False,
        hovertemplate="stopped at step %{x}",
    )  # fmt: skip


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
