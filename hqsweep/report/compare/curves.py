"""The loss curve of one run in numbers: its trailing mean, the mean over a fork's decay, spikes, the loss that a
doubling of tokens takes off, and where it diverged.

Tokens are train.batch x train.context a step. Losses are in nats.
"""

import hashlib
import math

import numpy as np
import pandas as pd
from pandas.api.typing import SeriesGroupBy
from scipy import stats

from hqsweep.config.train import LEARNT_NATS
from hqsweep.report.compare.frames import FORK, Frames
from hqsweep.verdicts.estimate import LEVEL

ENTROPY = "manifest.data.unigram_entropy_nats"
"""The loss that a model which ignores its context cannot beat."""
SPIKE_SD, SPIKE_WINDOW, SPIKE_LEAST = 7.0, 1000, 20
RISE_NATS = 1.0
ROUNDING = 1e-9
"""The slope of a flat loss, in nats."""


def measures(frames: Frames, window: float) -> pd.DataFrame:
    """One row per run, in the order of frames.runs: run, arm, trunk, seed, point, draw, state, then

    final_loss, train_loss             means of val_loss and of train_loss over the trailing window, at least the last
                                       value; of a fork the last val_loss, and train_loss over the decay (decay_means);
                                       NaN unless the run finished and all of them are finite
    loss_spikes_pct, grad_spikes_pct   spike scores of train_loss and grad_norm
    diverged_at                        tokens at divergence, NaN for none
    """
    rows = frames.runs[["run", "arm", "trunk", "seed", "point", "draw", "state"]].copy()
    by_metric = {name: part.sort_values(["run", "step"]) for name, part in frames.metrics.groupby("metric")}
    empty, forks = frames.metrics.iloc[:0], set(frames.runs["run"][frames.runs["design"] == FORK])
    for column, metric in (("final_loss", "val_loss"), ("train_loss", "train_loss")):
        values = by_metric.get(metric, empty)
        of_fork = values["run"].isin(forks)
        means = [_means(trailing(values[~of_fork], window))]
        means += [_means(trailing(values[of_fork], 1)) if metric == "val_loss" else decay_means(frames.runs, values)]
        rows[column] = rows["run"].map(pd.concat(means))
        rows[column] = rows[column].where(np.isfinite(rows[column].astype(float)) & (rows["state"] == "finished"))
    for column, metric in (("loss_spikes_pct", "train_loss"), ("grad_spikes_pct", "grad_norm")):
        rows[column] = rows["run"].map(by_metric.get(metric, empty).groupby("run")["value"].agg(spike_score))
    rows["diverged_at"] = _divergences(frames, by_metric.get("train_loss", empty))
    return rows


def curve_hash(rows: pd.DataFrame) -> str:
    """sha256 over step and exact value of every train_loss and val_loss row of a run."""
    losses = rows[rows["metric"].isin(["train_loss", "val_loss"])].sort_values(["metric", "step"])
    lines = (f"{row.metric} {row.step} {row.value.hex()}\n" for row in losses.itertuples())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def trailing(rows: pd.DataFrame, window: float) -> pd.DataFrame:
    """The rows of the last `window` steps of each run (window >= 1), or of the last fraction of its steps (window < 1);
    at least its last row."""
    last = rows.groupby("run")["step"].transform("max")
    width = window if window >= 1 else (last * window).clip(lower=1)
    return rows[rows["step"] > last - width]


def _means(rows: pd.DataFrame) -> pd.Series:
    """The mean value of each run, NaN where a value is NaN."""
    return rows.groupby("run")["value"].agg(lambda values: values.mean(skipna=False)).astype(float)


def decay_means(runs: pd.DataFrame, train: pd.DataFrame) -> pd.Series:
    """run -> the mean train_loss over the decay of each fork among `runs`: the rows of `train` (ordered by run and
    step) after the fork's constant stretch, each with the number of steps that it is a mean of as its weight, counted
    from the row before it."""
    forks = runs[runs["design"] == FORK].set_index("run")
    rows = train[train["run"].isin(forks.index)]
    if rows.empty:
        return pd.Series(dtype="float64")
    point = rows["run"].map(forks["point"])
    weight = rows["step"] - rows.groupby("run")["step"].shift().fillna(point)
    constant = rows["run"].map(forks["config.fork.steps"])
    decay = rows.assign(weight=weight, loss=rows["value"] * weight)[rows["step"] > point + constant]
    sums = decay.groupby("run")[["loss", "weight"]].agg(lambda values: values.sum(skipna=False))
    return sums["loss"] / sums["weight"]


def intervals(groups: SeriesGroupBy) -> pd.DataFrame:
    """The mean, low, high and n (the number of values) of every group: the mean's own 95 % interval, mean -+ t(0.975, n
    - 1) sd / sqrt(n), for one group by itself. low and high are NaN for one value."""
    moments = groups.agg(["mean", "std", "count"])
    half = stats.t.ppf(1 - LEVEL / 2, moments["count"] - 1) * moments["std"] / np.sqrt(moments["count"])
    return pd.DataFrame(
        {
            "mean": moments["mean"],
            "low": moments["mean"] - half,
            "high": moments["mean"] + half,
            "n": moments["count"],
        }
    )


def loss_slope(steps: np.ndarray, losses: np.ndarray, until: float) -> float:
    """The nats that a doubling of tokens takes off the loss: least squares of the losses on log2(step) between until /
    2 and `until`, with the sign turned; NaN for fewer than three points there."""
    part = (steps >= until / 2) & (steps <= until) & np.isfinite(losses)
    if part.sum() < 3:
        return math.nan
    slope = -float(np.polyfit(np.log2(steps[part]), losses[part], 1)[0])
    return slope if abs(slope) > ROUNDING else 0.0


def spike_score(values: pd.Series) -> float:
    """The percentage of values at least 7 standard deviations from the mean of the (up to 1000) values before them, as
    in OLMo 2 (arXiv:2501.00656). Values with fewer than 20 before them cannot be spikes; NaN where no value has
    more."""
    before = values.rolling(SPIKE_WINDOW, min_periods=SPIKE_LEAST)
    mean, sd = before.mean().shift(1), before.std().shift(1)
    if not mean.notna().any():
        return math.nan
    off = (values - mean).abs()
    return 100 * float(((off >= SPIKE_SD * sd) & (off > 0)).sum()) / len(values)


def divergence_step(steps: np.ndarray, losses: np.ndarray, entropy: float) -> float:
    """The first step of the last unbroken stretch, up to the end of the curve, in which the loss is NaN, infinite, or
    above a limit: `entropy` (nats; NaN for unknown) for a run that has been 0.1 nats below it, else 1 nat above the
    first loss. NaN for none: a spike that the run recovers from is no divergence."""
    if not len(losses):
        return math.nan
    limit = entropy if (losses < entropy - LEARNT_NATS).any() else losses[0] + RISE_NATS
    good = np.flatnonzero(losses <= limit)
    first = good[-1] + 1 if len(good) else 0
    return float(steps[first]) if first < len(steps) else math.nan


def tokens_per_step(runs: pd.DataFrame) -> pd.Series:
    """The tokens in a step of each run, indexed by run."""
    tokens = runs["config.train.batch"] * runs["config.train.context"]
    return tokens.set_axis(runs["run"])


def _divergences(frames: Frames, train: pd.DataFrame) -> list[float]:
    """The tokens at divergence of each run of frames.runs, NaN for none. A run that its worker reports as diverged, but
    whose rows do not show where, diverged at its last step."""
    curves = {run: (part["step"].to_numpy(), part["value"].to_numpy()) for run, part in train.groupby("run")}
    tokens, ends = tokens_per_step(frames.runs), []
    for run in frames.runs.to_dict("records"):
        entropy = run.get(ENTROPY)
        steps, losses = curves.get(run["run"], (np.array([]), np.array([])))
        at = divergence_step(steps, losses, math.nan if entropy is None else entropy)
        if math.isnan(at) and run["diverged"]:
            at = run["step"]
        ends.append(at * tokens[run["run"]])
    return ends
