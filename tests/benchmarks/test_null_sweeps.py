"""benchmarks/null_sweeps.py: sweeps train; published rates are those of the published rows, and keep their levels."""

import json

import numpy as np
import pytest
from scipy import stats

from benchmarks import null_sweeps
from benchmarks.rows import ROOT
from hqsweep.config.job import parse
from hqsweep.train import data

PUBLISHED = ROOT / "reports/benchmarks/null_sweeps.jsonl"


def test_noise_moves_the_loss_a_little():
    dataset = data.load(parse(null_sweeps.CONFIG).data)
    plain, noisy = (null_sweeps.train(dataset, 0, noise) for noise in (0.0, 0.01))
    assert 0 < abs(plain - noisy) < 0.05


def test_noise_at_the_fork_moves_the_loss_of_the_decay_far_less(monkeypatch):
    monkeypatch.setattr(null_sweeps, "POINTS", (8, 16))
    dataset = data.load(parse(null_sweeps.CONFIG | {"data": null_sweeps.FORK_DATA}).data)
    losses = null_sweeps.train_forks(dataset, 0)
    gaps = np.abs(np.subtract(losses[null_sweeps.ARM], losses["baseline"]))
    assert (gaps > 0).all() and (gaps < 0.005).all()


def test_a_rate_counts_sweeps_and_has_an_exact_interval():
    row = null_sweeps.rate("x", [True] + [False] * 199, 0.025)
    assert (row["alarms"], row["sweeps"], row["rate"]) == (1, 200, 0.005) and row["low"] < 0.005 < row["high"] < 0.03


@pytest.mark.parametrize("section", ["sweep", "fork sweep"])
def test_an_arm_off_by_the_margin_has_a_gap_that_is_larger_by_it(section):
    row = next(row for row in map(json.loads, PUBLISHED.open()) if row["section"] == section)
    plain, shifted = (null_sweeps.judge(row, shift) for shift in (0.0, 0.5))
    assert shifted.gap - plain.gap == pytest.approx(0.5) and plain.n == len(row["seeds"])


def test_published_rates_follow_from_the_published_sweeps_and_agree_with_their_levels():
    rows = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
    sweeps = [row for row in rows if row["section"] != "rate"]
    published = {row["case"]: row for row in rows if row["section"] == "rate"}
    for section, each in (("sweep", 3), ("fork sweep", 4)):
        seeds = [seed for row in sweeps if row["section"] == section for seed in row["seeds"]]
        assert len(seeds) == len(set(seeds)) == 200 * each
    computed = null_sweeps.rates(sweeps)
    assert len(computed) == 8 and {row["case"] for row in computed} == set(published)
    for row in computed:
        for key, value in row.items():
            assert published[row["case"]][key] == pytest.approx(value), (row["case"], key)
        if row["level"] is not None:  # as many are what a rate of the level may well give (1 in 1000 otherwise)
            test = stats.binomtest(row["alarms"], row["sweeps"], row["level"], alternative="greater")
            assert test.pvalue > 1e-3, row["case"]


def test_the_rates_in_the_docs_are_the_published_ones():
    rows = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
    rate = {row["case"]: f"{row['rate']:.1%}".replace("%", " %") for row in rows if row["section"] == "rate"}
    text = (ROOT / "docs/reports.md").read_text()
    for case, row in {
        "worse or better": "worse or better", "worse": "worse", "equivalent, as it is": "equivalent, as it is",
        "equivalent, with the arm off by the margin": "equivalent, of an arm that is off by the margin",
    }.items():  # fmt: skip
        assert f"| {row} | {rate[f'whole runs: {case}']} | {rate[f'forks: {case}']} |" in text
