"""The sentences: each says the verdict, its size, its interval, and what would decide the rest."""

import math

import pandas as pd
import pytest

from hqsweep.report.compare.verdict import digits, sentence

NAN = math.nan
WHOLE = {
    "arm": "nvfp4", "baseline": "bf16", "null": False, "design": "whole run", "runs": 4, "verdict": "undecided",
    "final_loss": 2.1, "n": 4, "gap_pct": 0.2, "ci_low_pct": -0.4, "ci_high_pct": 0.8, "half_pct": 0.6,
    "eq_low_pct": -0.1, "eq_high_pct": 0.5, "margin_pct": 0.25, "within_margin": False, "needed": 7.0, "more": 3.0,
    "replicate_minutes": 2.4, "maximum": 0, "these_low_pct": NAN, "these_high_pct": NAN, "diverged": 0,
    "slowdown_pct": NAN, "slowdown_low": NAN, "slowdown_high": NAN, "margin_tokens": NAN, "steps": NAN,
    "end": NAN, "at_once_pct": NAN, "course": "", "diverged_at": NAN, "pairs": 4, "paired_gap": 0.01,
    "null_in_doubt": False,
}  # fmt: skip
FORKS = WHOLE | {"design": "fork"}
NONE = pd.DataFrame({"state": []})


def said(row=FORKS, **changes):
    return sentence(row | changes, NONE)


def test_undecided_says_what_would_decide_and_what_that_costs_here():
    expected = "undecided against 'bf16': +0.20 % (95 % interval -0.40 to +0.80 %) over 4 trunks; about 3 more trunks"
    assert said() == f"{expected} (7 minutes here) would decide."
    assert "over 4 seeds; about 1 more seed (2 minutes here) would decide." in said(WHOLE, more=1.0)
    assert said(replicate_minutes=NAN).endswith("; about 3 more trunks would decide.")
    assert "(less than a minute here)" in said(replicate_minutes=0.1)
    assert "(60 hours here)" in said(replicate_minutes=1200.0)


def test_undecided_beyond_the_stated_maximum_and_beyond_reach():
    beyond = "about 7 trunks in all would decide, and this study has 6 at most."
    assert said(maximum=6).endswith(beyond) and "7 minutes" in said(maximum=7)
    assert said(more=math.inf, needed=math.inf).endswith("; no number of trunks within reach would decide it.")
    same = said(more=NAN, needed=NAN, ci_low_pct=NAN, ci_high_pct=NAN, half_pct=NAN)
    assert same.endswith("; the same gap in every one, which no test takes.") and "nan" not in same


def test_one_and_two_trunks_say_what_their_interval_covers():
    these = {"these_low_pct": 0.11, "these_high_pct": 0.29, "needed": 3.0}
    one = said(n=1, more=2.0, ci_low_pct=NAN, ci_high_pct=NAN, half_pct=NAN, **these)
    assert one == (
        "undecided against 'bf16': +0.20 % (95 % +0.110 to +0.290 %), which covers the fork points of this one trunk"
        " and says nothing about another seed; a verdict needs at least 2 more trunks (5 minutes here)."
    )
    two = said(n=2, more=1.0, **these)
    assert "of these two trunks and says nothing about all trunks; a verdict needs at least 1 more trunk (2" in two
    assert "at least 1 more trunk (2" in said(n=2, **these | {"more": math.inf, "needed": math.inf})
    assert "(95 %" not in said(n=1, more=2.0, **these | {"these_low_pct": NAN, "these_high_pct": NAN})  # one point
    single = said(WHOLE, n=1, ci_low_pct=NAN, ci_high_pct=NAN, half_pct=NAN, more=1.0)
    assert single.endswith("over one seed, which gives no interval; a verdict needs at least 1 more (2 minutes here).")


def test_worse_and_better_with_their_size():
    worse = {"verdict": "worse", "gap_pct": 1.31, "ci_low_pct": 0.9, "ci_high_pct": 1.72, "half_pct": 0.41}
    assert said(**worse) == "worse than 'bf16' by 1.31 % (95 % interval +0.90 to +1.72 %) over 4 trunks."
    better = worse | {"verdict": "better", "gap_pct": -1.31, "ci_low_pct": -1.72, "ci_high_pct": -0.9}
    assert said(**better).startswith("better than 'bf16' by 1.31 % (95 % interval -1.72 to -0.90 %)")
    small = worse | {"gap_pct": 0.12, "ci_low_pct": 0.06, "ci_high_pct": 0.18, "half_pct": 0.06, "within_margin": True}
    assert said(**small) == (
        "worse than 'bf16' by 0.120 % (95 % interval +0.060 to +0.180 %) over 4 trunks, inside the margin of 0.25 %."
    )


def test_equivalent_names_the_margin_and_the_interval_that_decides():
    near = {"verdict": "equivalent", "gap_pct": 0.03, "ci_low_pct": -0.14, "ci_high_pct": 0.2, "half_pct": 0.17}
    near |= {"within_margin": True, "eq_low_pct": -0.07, "eq_high_pct": 0.13}
    expected = "equivalent to 'bf16' within 0.25 %: +0.03 % (95 % interval -0.14 to +0.20 %) over 4 trunks"
    assert said(**near) == f"{expected}."
    wide = near | {"ci_low_pct": -0.24, "ci_high_pct": 0.3, "half_pct": 0.27}
    assert said(**wide).endswith("; the 90 % interval, which decides this, is -0.07 to +0.13 %.")
    assert said(**near | {"null": True}).startswith("Null arm: equivalent to 'bf16'")
    doubt = said(**near | {"null_in_doubt": True})
    assert doubt == f"{expected}. The null arm is not shown equal to 'bf16', so the machinery is in doubt."
    same = near | {"gap_pct": 0.0, "half_pct": 0.0}
    assert said(**same) == "equivalent to 'bf16': equal in every digit over 4 trunks."


def test_the_tokens_lead_and_the_gap_names_its_steps():
    tokens = {"slowdown_pct": 8.2, "slowdown_low": 7.5, "slowdown_high": 8.9, "steps": 160.0}
    gap = {"gap_pct": 1.31, "ci_low_pct": 0.9, "ci_high_pct": 1.72, "half_pct": 0.41}
    assert said(verdict="worse", **tokens, **gap) == (
        "worse than 'bf16': 8.2 % more tokens for the same loss (+7.5 to +8.9 %); +1.31 % (95 % interval +0.90 to"
        " +1.72 %) over 4 trunks, 160 steps after the fork."
    )
    near = tokens | {"slowdown_pct": -0.31, "slowdown_low": -0.36, "slowdown_high": -0.26, "margin_tokens": 1.0}
    assert said(verdict="equivalent", **near).startswith(
        "equivalent to 'bf16' within 1 % of the tokens: 0.31 % fewer tokens for the same loss (-0.36 to -0.26 %); "
    )
    one = near | {"slowdown_pct": 30.0, "slowdown_low": NAN, "slowdown_high": NAN}
    assert said(**one).startswith("undecided against 'bf16': 30 % more tokens for the same loss; +0.20 %")
    least = near | {"slowdown_pct": NAN, "slowdown_low": 44.6, "slowdown_high": math.inf}
    assert said(**least).startswith("undecided against 'bf16': at least 45 % more tokens for the same loss; +0.20 %")
    fewer = near | {"slowdown_pct": NAN, "slowdown_low": -100.0, "slowdown_high": -12.0}
    assert said(**fewer).startswith("undecided against 'bf16': at least 12 % fewer tokens for the same loss; ")


def test_what_has_no_verdict_says_why():
    failed = pd.DataFrame([{"seed": 1, "point": 80, "design": "fork", "state": "failed", "reason": "out of memory"}])
    text = sentence(FORKS | {"verdict": "failed"}, failed)
    assert text.startswith("1 of 4 runs without a result: seed 1 at 80 failed (out of memory). No run of this arm")
    many = pd.concat([failed.assign(seed=seed) for seed in range(3)])
    assert "3 of 4 runs without a result: 3 failed (out of memory), the first seed 0 at 80. " in sentence(FORKS, many)
    diverged = {"verdict": "diverged", "diverged": 1, "diverged_at": 19200.0, "pairs": 3, "paired_gap": 0.012}
    assert said(**diverged) == (
        "1 of 4 runs diverged, the first at 19,200 tokens. No verdict. The others end +0.0120 nats from 'bf16' over 3"
        " runs."
    )
    assert said(**diverged | {"pairs": 0}).endswith("No verdict, and no other run is paired with 'bf16'.")
    assert said(verdict="unpaired") == "No finished trunk in common with 'bf16': no gap."
    assert said(verdict="unpaired", design="whole run").startswith("No finished seed in common with 'bf16' and the oth")
    assert said(verdict="waiting").startswith("It still runs, and waits for seeds")
    assert said(verdict="baseline") == "Baseline: final val loss 2.1000 nats."
    assert said(verdict="baseline", final_loss=NAN) == "No run of the baseline has a final loss."


@pytest.mark.parametrize(("half", "places"), [(NAN, 2), (0.0, 2), (3.0, 2), (0.1, 2), (0.06, 3), (1e-9, 3)])
def test_a_narrow_interval_has_a_third_decimal(half, places):
    assert digits(half) == places


def test_no_number_of_seeds_is_told_of_the_null_arm():
    assert said(null=True, more=NAN, needed=NAN).endswith("over 4 trunks.")


COURSE = {
    "at_once_pct": 1.4, "at_once_low": 1.2, "at_once_high": 1.6, "growth_pct": -0.2, "growth_low": -0.3,
    "growth_high": -0.1, "lasting_pct": NAN, "lasting_low": NAN, "lasting_high": NAN, "settles_in": NAN,
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), [
    ({"course": "flat", "lasting_pct": 0.31, "lasting_low": 0.2, "lasting_high": 0.42},
     "+0.31 % (+0.20 to +0.42 %) lasting"),
    ({"course": "flat"}, "flat at the end"),
    ({"course": "closing", "settles_in": 600.0}, "still closing by 0.20 % per 100 steps: about 600 more steps decide"),
    ({"course": "closing", "settles_in": math.inf}, "still closing by 0.20 % per 100 steps, with no end in sight"),
    ({"course": "closing", "settles_in": 0.0}, "still closing by 0.20 % per 100 steps"),
    ({"course": "growing"}, "growing by -0.200 % (-0.300 to -0.100 %) per 100 steps"),
    ({"course": "open"}, "not known to last: -0.200 % (-0.300 to -0.100 %) per 100 steps"),
])  # fmt: skip
def test_forks_say_what_comes_at_once_and_what_lasts(changes, words):
    text = said(verdict="worse", gap_pct=0.5, steps=320.0, **COURSE | changes)
    at_once = "320 steps after the fork; before the decay +1.40 % (+1.20 to +1.60 %) at once, "
    assert text.endswith(f"{at_once}{words}.") and "nan" not in text
