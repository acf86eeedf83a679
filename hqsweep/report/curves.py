"""The loss curve of one run in numbers: its trailing mean, its spikes, the tokens to a loss, and where it diverged.

Tokens are train.batch x train.context a step. Losses are in nats.
"""

import math

import numpy as np
import pandas as pd

from hqsweep.report.frames import Frames

ENTROPY = "manifest.data.unigram_entropy_nats"
"""The loss that a model which ignores its context cannot beat."""
SPIKE_SD, SPIKE_WINDOW, SPIKE_LEAST = 7.0, 1000, 20
LEARNT_NATS, RISE_NATS = 0.1, 1.0


def measures(frames: Frames, window: float) -> pd.DataFrame:
    """One row per run, in the order of frames.runs: run, arm, seed, state, then

    final_loss, train_loss             means of val_loss and of train_loss over the trailing window, at least the last
                                       value; NaN unless the run finished and all of them are finite
    loss_spikes_pct, grad_spikes_pct   spike scores of train_loss and grad_norm
    diverged_at                        tokens at divergence, NaN for none
    """
    rows = frames.runs[["run", "arm", "seed", "state"]].copy()
    by_metric = {name: part.sort_values(["run", "step"]) for name, part in frames.metrics.groupby("metric")}
    empty = frames.metrics.iloc[:0]
    for column, metric in (("final_loss", "val_loss"), ("train_loss", "train_loss")):
        means = trailing(by_metric.get(metric, empty), window).groupby("run")["value"]
        rows[column] = rows["run"].map(means.agg(lambda values: values.mean(skipna=False)))
        rows[column] = rows[column].where(np.isfinite(rows[column].astype(float)) & (rows["state"] == "finished"))
    for column, metric in (("loss_spikes_pct", "train_loss"), ("grad_spikes_pct", "grad_norm")):
        rows[column] = rows["run"].map(by_metric.get(metric, empty).groupby("run")["value"].agg(spike_score))
    rows["diverged_at"] = _divergences(frames, by_metric.get("train_loss", empty))
    return rows


def trailing(rows: pd.DataFrame, window: float) -> pd.DataFrame:
    """Rows of the last `window` steps of each run (window >= 1), or of the last fraction of its steps (window < 1); at
    least its last row."""
    last = rows.groupby("run")["step"].transform("max")
    width = window if window >= 1 else (last * window).clip(lower=1)
    return rows[rows["step"] > last - width]


def spike_score(values: pd.Series) -> float:
    """Percentage of values at least 7 standard deviations from the mean of the (up to 1000) values before them, as in
    OLMo 2 (arXiv:2501.00656). Values with fewer than 20 before them cannot be spikes; NaN where all are such."""
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


def steps_to(steps: np.ndarray, losses: np.ndarray, target: float) -> float:
    """The first step at which the loss is at most `target`, on straight lines between the points; NaN for
    none, and never before the first point."""
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return math.nan
    at = reached[0]
    if at == 0:
        return float(steps[0])
    (x0, x1), (y0, y1) = steps[at - 1 : at + 1], losses[at - 1 : at + 1]
    return float(x0 + (x1 - x0) * (y0 - target) / (y0 - y1))


def tokens_per_step(runs: pd.DataFrame) -> pd.Series:
    """Tokens in a step of each run, indexed by run."""
    tokens = runs["config.train.batch"] * runs["config.train.context"]
    return tokens.set_axis(runs["run"])


def overheads(frames: Frames, finals: pd.DataFrame, partner: pd.Series) -> pd.Series:
    """Tokens-to-loss overhead in % of each row of `finals`: how many more tokens the run took than the run `partner`
    names (None for none) to the higher of their two final val_losses, the lowest that both reached."""
    curves = {
        run: (part["step"].to_numpy(), part["value"].to_numpy())
        for run, part in frames.metrics[frames.metrics["metric"] == "val_loss"].sort_values("step").groupby("run")
    }
    tokens, ends = tokens_per_step(frames.runs), finals.set_index("run")["final_loss"]

    def overhead(run: str, other: str | None) -> float:
        if other is None or math.isnan(ends[run]) or math.isnan(ends[other]):
            return math.nan
        target = max(ends[run], ends[other])
        taken, reference = (tokens[name] * steps_to(*curves[name], target) for name in (run, other))
        return 100 * (taken / reference - 1)

    pairs = zip(finals["run"], partner, strict=True)
    return pd.Series([overhead(run, other) for run, other in pairs], index=finals.index, dtype=float)


def _divergences(frames: Frames, train: pd.DataFrame) -> list[float]:
    """Tokens at divergence of each run of frames.runs, NaN for none. A run that its worker says has diverged, but whose
    rows do not show where, did at its last step."""
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
