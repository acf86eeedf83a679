"""How far arms moved: pairing, what cancels, what the stored draws are worth, and how often it is a false alarm."""

import numpy as np
import pandas as pd
import pytest

from hqsweep.recipe.argument import parse_recipe
from hqsweep.recipe.listing import described
from hqsweep.report.compare.frames import FORK, WHOLE
from hqsweep.report.gate.baseline import Baseline
from hqsweep.report.gate.change import Family, broken, changes, difference, equal, judge, recipe_changes
from hqsweep.verdicts import judging
from hqsweep.verdicts.designs import Forks


def rows_of(losses, stored=2.0):
    """Rows of `changes` from arm -> changes in nats [replicates, points]; `stored` nats for every run."""
    return pd.DataFrame(
        {"arm": arm, "trunk": f"t{t}", "draw": f"{100 * j}", "change": float(value), "stored": stored}
        for arm, values in losses.items()
        for (t, j), value in np.ndenumerate(np.asarray(values))
    )


FAMILY = Family(arms=("mxfp8", "nvfp4"), baseline="bf16", null="null")


def test_changes_are_against_the_mean_of_the_draws():
    def entries(**losses):
        return {(arm, 3, 40): {"final_loss": "0x1p9", "decay_loss": float(loss).hex()} for arm, loss in losses.items()}

    runs = pd.DataFrame({"arm": ["a", "b", "c"], "seed": 3, "point": 40, "trunk": "t", "draw": "40"})
    stored = Baseline(path=None, recipes={}, draws=(entries(a=2.0, c=1.0), entries(a=4.0)), sweeps=((), ()))
    moves = changes(runs, entries(a=3.5, b=1.0), stored)
    assert moves.to_dict("records") == [{"arm": "a", "trunk": "t", "draw": "40", "change": 0.5, "stored": 3.0}]


def test_a_fork_s_arm_is_judged_by_the_change_of_its_gap_trunk_by_trunk():
    rng = np.random.default_rng(0)
    trunk = rng.normal(0, 0.1, (4, 2))  # what the trunk moved, in every arm
    moved = {arm: trunk + rng.normal(gap, 0.001, (4, 2)) for arm, gap in
             {"bf16": 0, "null": 0, "mxfp8": 0, "nvfp4": 0.02}.items()}  # fmt: skip
    verdicts = judge(rows_of(moved), FAMILY, FORK, 0.25)
    gaps = {arm: 50 * (values - moved["bf16"]) for arm, values in moved.items()}  # in % of 2 nats
    expected = judging.judge_forks({arm: gaps[arm] for arm in ("mxfp8", "nvfp4")}, margin=0.25)
    for arm, estimate in expected.items():
        assert (verdicts[arm].gap, verdicts[arm].ci_low) == pytest.approx((estimate.gap, estimate.ci_low), rel=1e-12)
    assert {arm: each.verdict for arm, each in verdicts.items()} == {
        "bf16": "undecided", "null": "equivalent", "mxfp8": "equivalent", "nvfp4": "worse",
    }  # fmt: skip
    assert verdicts["bf16"].gap == pytest.approx(50 * trunk.mean(), rel=0.05)


def test_forks_that_end_together_are_judged_by_the_gap_of_a_whole_run():
    """Forks at 0 and 100 of 200 steps have the ages 200 and 100: the line through them at 200 is the fork at 0."""
    rng = np.random.default_rng(0)
    moved = {arm: rng.normal(0.002, 0.001, (4, 2)) for arm in ("bf16", "null", "mxfp8", "nvfp4")}
    family = Family(arms=("mxfp8", "nvfp4"), baseline="bf16", null="null", end=200)
    verdicts = judge(rows_of(moved), family, FORK, 0.25)
    gaps = 50 * (moved["nvfp4"] - moved["bf16"])
    expected = judging.judge_forks({"nvfp4": gaps[:, :1], "mxfp8": gaps[:, 1:]}, margin=0.25)["nvfp4"]
    assert (verdicts["nvfp4"].gap, verdicts["nvfp4"].ci_low) == pytest.approx((expected.gap, expected.ci_low))
    assert verdicts["bf16"].gap == pytest.approx(50 * moved["bf16"][:, 0].mean())
    apart = judge(rows_of(moved), FAMILY, FORK, 0.25)["nvfp4"]
    assert apart.gap == pytest.approx(gaps.mean()) and apart.gap != verdicts["nvfp4"].gap


def test_per_cent_are_of_the_baseline_s_stored_loss_at_that_fork():
    rows = rows_of({"bf16": np.zeros((3, 2)), "mxfp8": np.full((3, 2), 0.01)})
    rows.loc[rows["draw"] == "100", "stored"] = 1.0
    verdicts = judge(rows, Family(arms=("mxfp8",), baseline="bf16", null=None), FORK, 0.25)
    assert verdicts["mxfp8"].gap == pytest.approx((0.5 + 1.0) / 2)


def test_whole_runs_are_judged_with_the_null_arm_as_second_control_and_pooled():
    rng = np.random.default_rng(1)
    moved = {arm: rng.normal(gap, 0.01, (5, 1)) for arm, gap in
             {"bf16": 0, "null": 0, "mxfp8": 0, "nvfp4": 0.2}.items()}  # fmt: skip
    verdicts = judge(rows_of(moved), FAMILY, WHOLE, 0.25)
    losses = {arm: 50 * values[:, 0] for arm, values in moved.items()}
    expected = judging.judge_whole_runs(losses, baseline="bf16", null="null", margin=0.25)
    assert verdicts["nvfp4"] == expected["nvfp4"] and verdicts["mxfp8"] == expected["mxfp8"]
    assert verdicts["nvfp4"].worse and not verdicts["bf16"].worse


def test_only_what_all_arms_have_enters():
    moved = {arm: np.zeros((4, 2)) for arm in ("bf16", "mxfp8")}
    rows = rows_of(moved)
    family = Family(arms=("mxfp8",), baseline="bf16", null=None)
    lacks = rows.drop(rows.index[(rows["arm"] == "mxfp8") & (rows["trunk"] == "t1") & (rows["draw"] == "100")])
    assert judge(lacks, family, FORK, 0.25)["mxfp8"].n == 4  # without the point 100
    torn = lacks.drop(lacks.index[(lacks["arm"] == "bf16") & (lacks["trunk"] == "t2") & (lacks["draw"] == "0")])
    assert judge(torn, family, FORK, 0.25)["mxfp8"].n == 2  # trunks with both points
    assert judge(rows[rows["arm"] == "mxfp8"], family, FORK, 0.25) == {}
    assert judge(rows[(rows["arm"] == "bf16") != (rows["trunk"] == "t0")], family, FORK, 0.25) == {}


BASELINES, SWEEPS, ARMS, TRUNKS = 400, 200, 3, 4


def alarm_rates(draws: int) -> np.ndarray:
    """Share of sweeps without any change in which an arm is worse, for each of many stored baselines."""
    rng = np.random.default_rng(draws)
    stored = rng.normal(0, 1, (BASELINES, 1, ARMS, TRUNKS, draws)).mean(-1)
    gap, error = judging.fit_forks((rng.normal(0, 1, (BASELINES, SWEEPS, ARMS, TRUNKS)) - stored)[..., None], TRUNKS)
    return (gap > Forks(arms=ARMS).critical(TRUNKS) * error).any(-1).mean(-1)


def test_more_stored_draws_make_every_baseline_alarm_at_about_the_stated_rate():
    """The rate is 2.5 % over all baselines, and of one draw anything from none to three times that for one of them."""
    one, eight = alarm_rates(1), alarm_rates(8)
    assert one.mean() == pytest.approx(0.024, abs=0.005) and eight.mean() == pytest.approx(0.024, abs=0.005)
    assert np.quantile(one, 0.95) > 0.07 and np.quantile(eight, 0.95) < 0.06
    assert np.quantile(one, 0.05) == 0 < np.quantile(eight, 0.05)


def recipe(linear, **keys):
    return described(parse_recipe({"name": "x", "linear": linear} | keys))


def entry(curve="a", run_id="1", **machine):
    return {"curve_sha256": curve, "run_id": run_id, "fingerprint": {"threads": "2", "isa": "avx2"} | machine}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (recipe("mxfp8"), recipe("mxfp8"), ""),
        (
            recipe("mxfp8"),
            recipe("mxfp4"),
            "linear.input, linear.weight, linear.grad_output rowwise and columnwise mxfp8 -> mxfp4",
        ),
        (
            recipe("mxfp8"),
            recipe({"input": "mxfp8", "weight": "mxfp8|mxfp4", "grad_output": "mxfp8"}),
            "linear.weight columnwise mxfp8 -> mxfp4",
        ),
        (
            recipe("nvfp4|mxfp8", gemm="exact"),
            recipe("nvfp4|mxfp8@rowwise_dequantized", gemm="exact", head="mxfp8"),
            "linear.input, linear.weight, linear.grad_output columnwise_source original -> rowwise_dequantized; "
            "head.input, head.weight, head.grad_output rowwise and columnwise bf16 -> mxfp8",
        ),
        (
            recipe("mxfp8"),
            recipe("mxfp8", grouped_linear={"input": "mxfp8", "weight": "mxfp4|mxfp8", "grad_output": "mxfp8"}),
            "grouped_linear.weight rowwise mxfp8 -> mxfp4",
        ),
        (
            recipe("mxfp8"),
            recipe("mxfp8", gemm="native", overrides=[{"name": "layers.0.*", "linear": "bf16"}]),
            "overrides[0].linear.input, overrides[0].linear.weight, overrides[0].linear.grad_output rowwise and "
            "columnwise none -> bf16; gemm exact -> native; overrides[0] none -> 'layers.0.*'",
        ),
    ],
)  # fmt: skip
def test_a_change_of_a_recipe_is_named_by_slot_and_direction(old, new, says):
    assert recipe_changes(old, new) == says


def test_a_run_may_equal_any_draw_and_must_equal_one_of_its_own_machine():
    new, draws = entry("b"), [entry("a", threads="1"), entry("b", threads="1")]
    assert equal(new, draws) and not broken(new, draws)
    assert not equal(entry("c"), draws) and not broken(entry("c"), draws)
    assert broken(entry("c"), [*draws, entry("d")])
    assert not broken(entry("c", run_id="2"), [entry("d")])


def test_the_difference_is_that_to_the_draw_whose_machine_is_most_like_this_one():
    far, near = entry("a", threads="1", isa="avx512"), entry("b", threads="4")
    assert difference([(entry("c"), [far, near])]) == "curves differ, and so does threads 4 -> 2"
    assert difference([(entry("c"), [far, entry("b")])]) == "curves differ on an equal machine and config"
    assert difference([(entry("b"), [far, near])]) == "bitwise equal"


def test_another_config_is_named_by_its_recipe_where_that_changed():
    pairs = [(entry("c", run_id="2"), [entry("a")])]
    assert difference(pairs) == "curves differ, and so does the config"
    assert difference(pairs, "gemm exact -> native") == "curves differ, and so does the recipe: gemm exact -> native"
