"""The gap of every arm against the size of the model: the measured sizes, and the predictions."""

import numpy as np
import pandas as pd

from hqsweep.report.compare.ladder import Ladder, size_text
from hqsweep.report.figures.look import (
    BASELINE_COLOUR,
    Panel,
    figure,
    line_with_band,
    listed,
    margin_band,
    styles,
    symbol,
)


def ladder_panel(found: Ladder) -> Panel:
    """Return the figure: a mark for each measured size, a line and a band of predictions."""
    sizes = np.log10(found.curves["params"])
    log = {"type": "log", "range": [float(sizes.min()) - 0.05, float(sizes.max()) + 0.05]}
    fig = figure("gap, % of the baseline's loss", "parameters", y={"tickformat": "+.4~g"}, x=log)
    margin_band(fig, found.margin)
    fig.add_hline(y=0, line={"color": BASELINE_COLOUR, "width": 1})
    arms = pd.DataFrame({"arm": [*found.predictions], "baseline": "", "null": False})
    for arm, style in styles(arms).items():
        line = found.curves[found.curves["arm"] == arm].rename(columns={"params": "step"})
        line_with_band(fig, arm, style, line, ("gap_pct", "low", "high"), "%{x:.3g} parameters: %{y:+.3f} %")
        own = found.measured[(found.measured["arm"] == arm) & (found.measured["design"] == found.design)]
        fig.add_scatter(
            x=own["params"], y=own["gap_pct"], mode="markers", legendgroup=arm,
            marker={"color": style["color"], "symbol": symbol(style), "size": 8},
            hovertemplate="%{x:.3g} parameters, measured: %{y:+.3f} %<extra></extra>",
        )  # fmt: skip
    said = listed(
        f"{arm} {one.gap:+.2f} % ({one.low:+.2f} to {one.high:+.2f})" for arm, one in found.predictions.items()
    )
    heading = f"Gap against size, up to {size_text(found.params)} parameters"
    return Panel(
        heading=heading, figure=fig, name="ladder", rows=found.curves,
        says=f"{heading}, in % of the baseline's loss. At the right end: {said}.",
    )  # fmt: skip
