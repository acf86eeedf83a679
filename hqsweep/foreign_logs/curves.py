"""The curves of runs, thinned while they are read, so that they fit a page and all runs keep the same steps.

A step stays if it is a whole number of strides from the first step of the log. The stride doubles whenever too many
rows are kept, so that what is kept earlier holds all that is kept later.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

MOST_ROWS = 100_000
"""The rows that are kept of all runs together."""


class Curves:
    """Takes rows in pieces."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most, self._stride, self._first = most, 1.0, math.nan
        self._kept = pd.DataFrame({"run": np.array([], np.int64), "step": [], "value": []})

    def add(self, rows: pd.DataFrame) -> None:
        """Take rows with columns run (a number), step and value."""
        if rows.empty:
            return
        if math.isnan(self._first):
            self._first = float(rows["step"].min())
        self._kept = pd.concat([self._kept, self._on_stride(rows)], ignore_index=True)
        while len(self._kept) > self._most and self._stride < 2**60:
            steps = np.unique(np.abs(self._kept["step"].to_numpy() - self._first))
            whole = steps[np.isfinite(steps)].round().astype(np.int64)
            self._stride = max(2 * self._stride, 2.0 * np.gcd.reduce(whole))
            self._kept = self._on_stride(self._kept)

    def _on_stride(self, rows: pd.DataFrame) -> pd.DataFrame:
        if self._stride == 1:
            return rows[np.isfinite(rows["step"])]
        return rows[(rows["step"] - self._first) % self._stride == 0]

    def rows(self, runs: pd.DataFrame) -> pd.DataFrame:
        """The kept rows: arm, replicate, draw, step, value; of two rows of a step the later one. `runs` has arm,
        replicate and draw, and the numbers of runs as its index."""
        kept = self._kept[self._kept["run"].isin(runs.index)].drop_duplicates(["run", "step"], keep="last")
        named = runs[["arm", "replicate", "draw"]].loc[kept["run"]].reset_index(drop=True)
        return pd.concat([named, kept[["step", "value"]].reset_index(drop=True)], axis=1)


def means(rows: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """arm, step, mean, lowest, highest and runs (their number), at the steps that all runs of the arm have; where no
    step is in all of them, at every step."""
    finite = rows[np.isfinite(rows["value"]) & rows["arm"].isin(arms)]
    by_step = finite.groupby(["arm", "step"])["value"].agg(["mean", "min", "max", "count"])
    frame = by_step.reset_index().set_axis(["arm", "step", "mean", "lowest", "highest", "runs"], axis=1)
    most = frame.groupby("arm")["runs"].transform("max")
    return frame[frame["runs"] == most].reset_index(drop=True)
