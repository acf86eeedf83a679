"""benchmarks/null_sweeps.py: a sweep trains; published rates are those of the published rows, within their levels."""

import json

import pytest

from benchmarks import null_sweeps
from benchmarks.rows import ROOT
from hqsweep.config.job import parse
from hqsweep.train import data

PUBLISHED = ROOT / "reports/benchmarks/null_sweeps.jsonl"


def test_noise_moves_the_loss_a_little():
    dataset = data.load(parse(null_sweeps.CONFIG | {"model": {"dim": 32, "heads": 2}}).data)
    plain, noisy = (null_sweeps.train(dataset, 0, noise) for noise in (0.0, 0.01))
    assert 0 < abs(plain - noisy) < 0.05


def test_a_rate_counts_sweeps_and_has_an_exact_interval():
    row = null_sweeps.rate("x", [True] + [False] * 199, 0.025)
    assert (row["alarms"], row["sweeps"], row["rate"]) == (1, 200, 0.005) and row["low"] < 0.005 < row["high"] < 0.03


def test_published_rates_follow_from_the_published_sweeps_and_stay_within_their_levels():
    rows = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
    sweeps = [row for row in rows if row["section"] == "sweep"]
    published = {row["case"]: row for row in rows if row["section"] == "rate"}
    assert len(sweeps) == 200 and len({seed for row in sweeps for seed in row["seeds"]}) == 600
    for row in null_sweeps.rates(sweeps):
        for key, value in row.items():
            assert published[row["case"]][key] == pytest.approx(value), (row["case"], key)
        assert row["level"] is None or row["rate"] <= row["level"]
