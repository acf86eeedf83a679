"""The gap of every arm against the size of the model: the measured sizes, and the predictions."""

import numpy as np
import pandas as pd

from hqsweep.report.compare.ladder import Ladder, size_text
from hqsweep.report.figures.look import Panel, gaps_against, listed, styles


def ladder_panel(found: Ladder) -> Panel:
    """Return the figure: a mark for each measured size, a line and a band of predictions."""
    sizes = np.log10(found.curves["params"])
    log = {"type": "log", "range": [float(sizes.min()) - 0.05, float(sizes.max()) + 0.05]}
    look = styles(pd.DataFrame({"arm": [*found.predictions], "baseline": "", "null": False}))
    curves, measured = (rows.rename(columns={"params": "step"}) for rows in (found.curves, found.measured))
    measured = measured[measured["design"] == found.design].drop(columns="trunk", errors="ignore")
    hovers = "%{x:.3g} parameters: %{y:+.4f} %", "%{x:.3g} parameters, measured"
    fig = gaps_against("parameters", log, found.margin, look, curves, measured, hovers)
    said = listed(
        f"{arm} {one.gap:+.2f} % ({one.low:+.2f} to {one.high:+.2f})" for arm, one in found.predictions.items()
    )
    heading = f"Gap against size, up to {size_text(found.params)} parameters"
    return Panel(
        heading=heading, figure=fig, name="ladder", rows=found.curves,
        says=f"{heading}, in % of the baseline's loss. At the right end: {said}.",
    )  # fmt: skip
