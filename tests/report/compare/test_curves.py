"""One curve in numbers: trailing means, spikes, tokens to a loss, divergence."""

import math

import numpy as np
import pandas as pd
import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.curves import (
    decay_means,
    divergence_step,
    intervals,
    loss_slope,
    measures,
    spike_score,
    trailing,
)
from hqsweep.report.compare.frames import load


@pytest.mark.parametrize(("window", "steps"), [(10, [91, 100]), (0.5, [51, 100]), (0.001, [100, 100]), (500, [1, 100])])
def test_trailing_window_in_steps_or_as_a_fraction(window, steps):
    rows = pd.DataFrame({"run": "r", "step": range(1, 101), "value": 0.0})
    last = trailing(rows, window)["step"]
    assert [last.min(), last.max()] == steps


def test_val_loss_is_averaged_over_the_trailing_window_too(make_sweep, fake):
    frames = load(make_sweep([fake.Run()]))
    rows = frames.metrics.set_index(["metric", "step"])["value"]["val_loss"]
    assert measures(frames, 0.1)["final_loss"].iloc[0] == rows[fake.steps]
    assert measures(frames, 41)["final_loss"].iloc[0] == pytest.approx(rows.iloc[-3:].mean(), abs=1e-12)


def test_spike_score_counts_values_far_from_the_mean_before_them():
    rng = np.random.default_rng(0)
    calm = pd.Series(rng.normal(2, 0.1, 200))
    assert spike_score(calm) == 0
    calm[[50, 120]] = [9.0, -9.0]
    assert spike_score(calm) == 1.0
    assert math.isnan(spike_score(calm[:20])) and spike_score(pd.Series([1.0] * 30)) == 0
    assert spike_score(pd.Series([1.0] * 10 + [9.0] + [1.0] * 30)) == 0  # too early to be told from the rest


@pytest.mark.parametrize(
    ("losses", "entropy", "step"),
    [
        ([4, 3, 2, 1], 2.5, None),
        ([4, 3, 2, 1, 5, 1], 2.5, None),  # a spike
        ([4, 3, 2, 1, 5, 3], 2.5, 50),
        ([4, 3, 2, math.nan], 2.5, 40),
        ([4, 3, 2, 3, 4, math.inf], 2.5, 40),
        ([4, 4.2, 3.8, 4.3], 2.5, None),  # never learned
        ([4, 4.2, 5.5, 6], 2.5, 30),
        ([4, 3, 2, 3], math.nan, None),
        ([math.nan], math.nan, 10),
        ([], 2.5, None),
    ],
)
def test_divergence_is_the_start_of_the_last_stretch_above_the_limit(losses, entropy, step):
    first = divergence_step(10 * np.arange(1, len(losses) + 1), np.array(losses, dtype=float), entropy)
    assert first == step if step else math.isnan(first)


def test_tokens_at_divergence_are_in_the_arms_row_and_in_its_sentence(make_sweep, fake):
    runs = [fake.Run(seed=s) for s in (0, 1)] + [fake.Run(arm="nvfp4", seed=0)]
    runs += [fake.Run(arm="nvfp4", seed=1, nan_from=150, state="failed", reason="loss is nan at step 150", steps=150)]
    row = compare(make_sweep(runs), "bf16").arms.set_index("arm").loc["nvfp4"]
    assert row["verdict"] == "diverged" and row["diverged"] == 1 and row["diverged_at"] == 150 * 4 * 32
    assert (
        "1 of 2 runs diverged, the first at 19,200 tokens. No verdict. The others end +0.0000 nats" in row["sentence"]
    )


def test_the_mean_over_a_decay_weighs_each_row_by_the_steps_that_it_is_of():
    """A fork at 40: 5 nats to step 60, then 10 steps at 2, 5 at 3 and 5 at 4 nats: 2.75."""
    runs = pd.DataFrame({"run": ["f", "w"], "design": ["fork", "whole run"], "point": [40, 0]})
    runs["config.fork.steps"] = [20.0, math.nan]
    steps, values = [50, 60, 70, 75, 80, 10], [5.0, 5.0, 2.0, 3.0, 4.0, 9.0]
    train = pd.DataFrame({"run": ["f"] * 5 + ["w"], "step": steps, "value": values})
    assert decay_means(runs, train).to_dict() == {"f": 2.75}
    assert decay_means(runs, train.assign(value=[5, 5, 2, math.nan, 4, 9])).isna().all()
    assert decay_means(runs, train[train["run"] == "w"]).empty


def test_a_forks_final_loss_is_its_last_and_its_train_loss_that_of_the_decay(make_sweep, fake):
    runs = [run for run in fake.fork_study({"mxfp8": 0.01}, trunks=1) if run.arm != "trunk"]
    rows = measures(load(make_sweep([fake.Run(**vars(run) | {"val_gap": 0.5}) for run in runs])), 0.9)
    assert rows["train_loss"].tolist() == [2.0, 2.0, 2.01, 2.01] and set(rows["final_loss"]) == {2.5}
    assert rows["draw"].tolist() == ["40", "80", "40", "80"]


def test_the_loss_that_a_doubling_takes_off():
    steps = np.arange(1, 101)
    assert loss_slope(steps, 4 - 0.25 * np.log2(steps), 80) == pytest.approx(0.25)
    assert math.isnan(loss_slope(steps[:2], np.array([3.0, 2.0]), 2))


def test_an_interval_is_students_t_of_the_values():
    values = pd.Series([0.01, 0.03, 0.02])
    row = intervals(values.groupby([0, 0, 0])).loc[0]
    half = 4.302653 * 0.01 / 3**0.5
    assert tuple(row) == pytest.approx((0.02, 0.02 - half, 0.02 + half, 3))
    assert math.isnan(intervals(values[:1].groupby([0])).loc[0, "low"])
