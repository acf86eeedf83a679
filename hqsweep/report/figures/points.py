"""The direction of gradients: arms side by side as points on a line for each layer."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.compare.frames import by_module
from hqsweep.report.figures.look import (
    Panel,
    figure,
    label,
    listed,
    padded,
    styles,
    symbol,
)

SMALLEST = 1e-7
"""The value at which a smaller 1 - cosine is drawn: the rounding of a float32 product."""
GRADIENTS = {"dgrad": "Gradient of the input (dgrad)", "wgrad": "Gradient of the weight (wgrad)"}


def gradient_cosines(comparison: Comparison) -> list[Panel]:
    """Figures for dgrad and wgrad with a line per layer: 1 - cosine between the GEMM's output and the product in FP32,
    the median over sampled steps and seeds, and over the experts of a grouped linear, with a marker for each arm, on a
    logarithmic axis."""
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
