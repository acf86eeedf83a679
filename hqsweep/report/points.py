"""Numbers of arms side by side as points on a line: throughput, and the direction of gradients."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hqsweep.report.arms import Comparison
from hqsweep.report.frames import by_module
from hqsweep.report.look import (
    Panel,
    figure,
    label,
    listed,
    padded,
    styles,
    symbol,
)

LINE = 46
"""Pixels of height for an arm."""
SMALLEST = 1e-7
"""1 - cosine below this, the rounding of a float32 product, is drawn here."""
GRADIENTS = {"dgrad": "Gradient of the input (dgrad)", "wgrad": "Gradient of the weight (wgrad)"}


def throughput(comparison: Comparison, heading: str) -> Panel | None:
    """Tokens a second of every run as a dot, and their mean by arm as a diamond."""
    rows = comparison.frames.runs[["arm", "seed", "tokens_per_s"]].dropna()
    arms = [arm for arm in comparison.arms["arm"] if arm in set(rows["arm"])]
    if not arms:
        return None
    fig, look, means = _lines(arms, "tokens/s"), styles(comparison), rows.groupby("arm")["tokens_per_s"].mean()
    for place, arm in enumerate(arms):
        colour = look[arm]["color"]
        _seeds(fig, place, rows[rows["arm"] == arm], "tokens_per_s", colour, "seed %{customdata}: %{x:,.0f} tokens/s")
        fig.add_scatter(
            x=[means[arm]],
            y=[place],
            mode="markers",
            marker={"color": colour, "size": 11, "symbol": "diamond"},
            hovertemplate="mean: %{x:,.0f} tokens/s<extra></extra>",
        )
    fig.update_xaxes(range=[0, 1.08 * rows["tokens_per_s"].max()], tickformat="~s")
    says = f"{heading}. {listed(f'{arm} {means[arm]:,.0f} tokens/s' for arm in arms)}."
    return Panel(heading=heading, figure=fig, name="throughput", rows=rows, says=says)


def gradient_cosines(comparison: Comparison) -> list[Panel]:
    """For dgrad and wgrad a line per layer: 1 - cosine between the GEMM's output and the product in FP32, the median
    over sampled steps and seeds, and over the experts of a grouped linear, a marker for each arm, on a logarithmic
    axis."""
    stats, look = by_module(comparison.frames.stats), styles(comparison)
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


def _lines(arms: pd.Series | list[str], x_title: str) -> go.Figure:
    """A figure with a line for each arm, its name above the line, where long names have room."""
    fig = figure(
        "",
        x_title,
        height=80 + LINE * len(arms),
        x={"nticks": 8, "tickangle": 0},
        y={"range": [len(arms) - 0.5, -0.8], "showticklabels": False, "ticks": "", "showgrid": False},
    )
    name = {"x": 0, "xref": "paper", "yshift": 15, "xanchor": "left", "showarrow": False, "borderpad": 0}
    names = [
        name | {"text": label(arm), "y": place, "bgcolor": "rgba(255,255,255,0.8)"} for place, arm in enumerate(arms)
    ]
    return fig.update_layout(margin={"l": 12, "t": 4}, annotations=names)


def _seeds(fig: go.Figure, place: int, rows: pd.DataFrame, column: str, colour: str, hover: str) -> None:
    fig.add_scatter(
        x=rows[column],
        y=[place] * len(rows),
        customdata=rows["seed"],
        hovertemplate=hover,
        mode="markers",
        marker={"color": colour, "size": 7, "opacity": 0.45},
    )
