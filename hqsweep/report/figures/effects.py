"""Effects of a factorial study: a line for each, with its joint interval."""

from hqsweep.report.compare.arms import Comparison
from hqsweep.report.figures.look import BASELINE_COLOUR, COLOURS, NULL_COLOUR, Panel, figure, label, listed

LINE = 20
"""Pixels of an effect."""
HEADINGS = {1: "Main effects", 2: "Interactions"}


def effect_panels(comparison: Comparison) -> list[Panel]:
    """Return a figure of the main effects and one of the interactions; [] without a factorial design."""
    return [
        _panel(comparison, order, own)
        for order, own in comparison.effects.table.groupby("order", sort=True)
        if own["low"].notna().all()
    ]


def _panel(comparison: Comparison, order, rows) -> Panel:
    names = [label(name) for name in rows["effect"]]
    fig = figure(
        "", "% of the baseline's loss", height=110 + LINE * len(rows), x={"tickformat": "+.4~g"},
        y={"categoryorder": "array", "categoryarray": names[::-1], "showgrid": False, "type": "category"},
    )  # fmt: skip
    fig.add_vline(x=0, line={"color": BASELINE_COLOUR, "width": 1})
    for name, row in zip(names, rows.itertuples(), strict=True):
        colour = (COLOURS[1] if row.pct > 0 else COLOURS[2]) if row.resolved else NULL_COLOUR
        fig.add_scatter(x=[row.low, row.high], y=[name, name], mode="lines", line={"color": colour, "width": 2},
                        hoverinfo="skip")  # fmt: skip
        fig.add_scatter(
            x=[row.pct], y=[name], mode="markers", marker={"color": colour, "symbol": "circle", "size": 8},
            hovertemplate=f"{name}: %{{x:+.4f}} % ({row.low:+.4f} to {row.high:+.4f})<extra></extra>",
        )  # fmt: skip
    heading = HEADINGS[order]
    said = listed(f"{row.effect} {row.pct:+.3f} %" for row in rows.itertuples() if row.resolved)
    return Panel(
        heading=heading, figure=fig, name="effects", rows=comparison.effects.table,
        says=f"{heading}, in % of the baseline's loss. Resolved: {said or 'none'}.",
    )  # fmt: skip
