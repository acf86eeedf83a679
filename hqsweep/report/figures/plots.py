"""The figures of a comparison as plotly's, each whole by itself: with a title, and a legend of its arms.

Those of a report's page have one legend and their headings in common. The forest plot, which the page draws without
plotly, is drawn here from the same rows.
"""

import plotly.graph_objects as go

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.figures.forest import Forest
from hqsweep.report.figures.look import MARGIN_BAND, figure, label
from hqsweep.report.pages import html
from hqsweep.report.pages.paper import named_panels

LINE = 34
"""Pixels of an arm's line in the forest plot."""


def plots(comparison: Comparison) -> dict[str, go.Figure]:
    """Name -> figure, the forest plot first."""
    panels = html.panels(comparison)
    drawn = {"forest": forest_plot(panels.forest)} if panels.forest else {}
    for name, panel in named_panels(panels).items():
        whole = go.Figure(panel.figure)
        legend = any(trace.type == "scatter" for trace in whole.data)
        for trace in whole.data:
            if trace.type == "scatter" and not trace.name:
                trace.showlegend = False  # the edges of bands
        whole.update_layout(title={"text": label(panel.heading)}, showlegend=legend, margin={"t": 48})
        drawn[name] = whole
    return drawn


def forest_plot(forest: Forest) -> go.Figure:
    """A line an arm: its gap with the 95 % interval, every replicate as a dot, and the margin as a band, in % of the
    baseline's loss. The axis is linear and as long as the page's; intervals may go on beyond it."""
    scale, lines = forest.scale, list(reversed(forest.lines))
    order, rows = [label(line.arm) for line in lines], forest.rows
    fig = figure("", "gap, % of the baseline's loss", height=110 + LINE * len(lines))
    fig.add_vrect(x0=-scale.margin, x1=scale.margin, fillcolor=MARGIN_BAND, line={"width": 0}, layer="below")
    fig.add_vline(x=0, line={"color": "#000", "width": 1})
    for line in lines:
        own = rows[rows["arm"] == line.arm]
        mean, single = own[own["replicate"] == "mean"].iloc[0], own[own["replicate"] != "mean"]
        place, colour = label(line.arm), line.colour
        fig.add_scatter(
            x=single["gap_pct"], y=[place] * len(single), mode="markers", text=single["replicate"], showlegend=False,
            marker={"color": colour, "size": 5, "opacity": 0.45}, hovertemplate="%{text}: %{x:+.4f} %<extra></extra>",
        )  # fmt: skip
        fig.add_scatter(
            x=[mean["gap_pct"]], y=[place], mode="markers", name=place, showlegend=False,
            marker={"color": colour, "size": 10, "symbol": "diamond"}, hovertemplate=label(line.says),
            error_x={
                "type": "data", "symmetric": False, "color": colour, "thickness": 2,
                "array": [mean["ci_high_pct"] - mean["gap_pct"]], "arrayminus": [mean["gap_pct"] - mean["ci_low_pct"]],
            },
        )  # fmt: skip
    fig.update_yaxes(categoryorder="array", categoryarray=order, showgrid=False)
    fig.update_xaxes(range=[scale.low, scale.high])
    fig.update_layout(title={"text": label(forest.heading)}, margin={"t": 48, "l": 12})
    return fig
