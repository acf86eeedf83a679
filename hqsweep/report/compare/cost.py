"""What one more replicate of a study costs: the minutes that its runs took so far, at as many at a time as its engine
has workers."""

import math

import pandas as pd

from hqsweep.report.compare.frames import FORK

WORKERS, PER_GPU = "config.engine.workers", "config.engine.runs_per_gpu"


def replicate_minutes(runs: pd.DataFrame, trunks: pd.DataFrame) -> float:
    """Minutes of one more seed, or trunk with its forks, in every arm; `runs` and `trunks` are rows of Frames.runs. NaN
    before an arm has finished a run."""
    seconds = 0.0
    for _, rows in runs.groupby("arm"):
        seconds += _mean_seconds(rows) * rows.groupby("trunk").size().max()
    if (runs["design"] == FORK).any() and len(trunks):
        seconds += _mean_seconds(trunks)
    return seconds / _workers(runs) / 60


def _mean_seconds(rows: pd.DataFrame) -> float:
    return float(rows["seconds"][rows["state"] == "finished"].mean())


def _workers(runs: pd.DataFrame) -> float:
    """Runs at a time: the most that any of the runs' configs says, 1 where none does."""
    stated = [runs[name].dropna().max() for name in (WORKERS, PER_GPU) if name in runs]
    return float(next((count for count in stated if not math.isnan(count)), 1))
