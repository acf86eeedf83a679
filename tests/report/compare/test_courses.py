"""The course of every arm from run folders: the parts of the gap at the constant rate, in cells and in the sentence."""

import json
import math

import numpy as np
import pytest

from hqsweep.report.compare.compare import compare, document
from hqsweep.report.figures.lines import growth_panels


def course(arm, seed, since):
    """In %: mxfp8 has a shock of 2 that heals in 40 steps and 0.3 that lasts; nvfp4 grows; the null arm has noise."""
    noise = 0.01 * np.random.default_rng([seed, since, len(arm)]).normal()
    middle = since - 5  # of the row
    parts = {"mxfp8": 0.3 + 2 * math.exp(-middle / 40), "nvfp4": 1.0 + 0.005 * middle, "bf16": 0.0, "trunk": 0.0}
    return parts.get(arm, 0.0) * (1 + 0.02 * seed) + (noise if arm != "bf16" else 0.0)


@pytest.fixture
def study(make_sweep, fake):
    """study(**changes) -> a study whose forks at step 40 run for 240 steps at the constant rate."""

    def make(**changes):
        gaps = {
            "mxfp8": lambda seed, point: 0.006 + 1e-4 * seed,
            "nvfp4": 0.04,
            "null": lambda seed, point: 1e-6 * seed,
        }
        known = {"points": (40,), "end": 300, "course": course} | changes
        return compare(make_sweep(fake.fork_study(gaps, **known)), "bf16", margin=0.25)

    return make


def test_an_arm_has_the_part_at_once_and_the_part_that_lasts(study):
    comparison = study()
    arms = comparison.arms.set_index("arm")
    row = arms.loc["mxfp8"]
    assert row["course"] == "flat" and row["lasting_low"] < 0.3 * 1.03 < row["lasting_high"]
    assert row["at_once_pct"] == pytest.approx((0.3 + 2 * math.exp(-5 / 40)) * 1.03, abs=0.02)
    assert row["at_once_low"] < row["at_once_pct"] < row["at_once_high"]
    assert f"; before the decay {row['at_once_pct']:+.2f} % (" in row["sentence"]
    assert f"at once, {row['lasting_pct']:+.3f} % (" in row["sentence"] and " %) lasting" in row["sentence"]
    assert arms.at["nvfp4", "course"] == "growing" and math.isnan(arms.at["nvfp4", "lasting_pct"])
    assert arms.at["nvfp4", "growth_pct"] == pytest.approx(0.5 * 1.03, abs=0.02)
    assert arms.at["null", "course"] == "flat" and arms.at["bf16", "course"] == ""
    told = {row["arm"]: row for row in json.loads(json.dumps(document(comparison)))["arms"]}
    assert told["mxfp8"]["course"] == "flat" and told["mxfp8"]["lasting_pct"] == pytest.approx(row["lasting_pct"])
    assert told["nvfp4"]["settles_in"] is None


def test_the_growth_panel_has_the_fit_and_the_lasting_part(study):
    (panel,) = growth_panels(study())
    fits = panel.rows[panel.rows["point"] == "fit"].set_index("arm")
    assert set(fits.index) == {"mxfp8", "nvfp4", "null"}
    own = fits.loc["mxfp8"]
    assert own["step"].tolist() == list(range(10, 241, 10))
    shape = [1.03 * (0.3 + 2 * math.exp(-(step - 5) / 40)) for step in own["step"]]
    assert own["gap_pct"].to_numpy() == pytest.approx(shape, abs=0.02)
    assert (own["low"] < own["high"]).all() and own["low"].nunique() == 1
    assert fits.loc["nvfp4", "low"].isna().all()
    dotted = [trace for trace in panel.figure.data if trace.line.dash == "dot"]
    assert len(dotted) == 3 and "The part that is lasting: mxfp8 +0.3" in panel.says


@pytest.mark.parametrize("changes", [{"trunks": 2}, {"end": 120}, {"points": (40, 80)}])
def test_few_trunks_short_forks_and_forks_that_end_together_have_no_course(study, changes):
    comparison = study(**changes)
    assert set(comparison.arms["course"]) == {""} and not comparison.courses
    assert not any("before the decay" in text for text in comparison.arms["sentence"])
    assert not any((panel.rows["point"] == "fit").any() for panel in growth_panels(comparison))
