"""The keys of a sweep as a whole: read once, refused in one sentence, kept in sweep.json, and in no run's config."""

import math

import pytest

from hqsweep.config.study import ForkStudy, StudyConfig, margin_in_tokens, parse_margin, parse_study
from hqsweep.errors import UserError
from hqsweep.sweep.engine.launch import plan
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.grid.overrides import STUDY_KEYS
from hqsweep.sweep.store.store import RunStore, sweep_file


@pytest.mark.parametrize("margin", ["1% tokens", "1%tokens", "1 % of the tokens", " 1.0 tokens"])
def test_a_margin_may_be_stated_in_tokens(margin: str) -> None:
    assert parse_margin(margin) == "1% tokens" and margin_in_tokens("1% tokens") == 1
    assert math.isnan(margin_in_tokens(parse_margin(0.25)))
    assert expand("convergence", ["margin=2%tokens"]).study.margin == "2% tokens"


@pytest.mark.parametrize("margin", ["200%tokens", "0% tokens", "a% of the tokens"])
def test_a_wrong_margin_in_tokens_is_named_whole(margin: str) -> None:
    with pytest.raises(UserError, match=rf"^margin: got '{margin}'; it takes .* at most 100, .* as in 1%tokens$"):
        parse_margin(margin)


def test_forks_that_end_together_have_their_own_steps() -> None:
    study = ForkStudy(at=[160, 360], end=480, decay=80)
    assert [study.steps_from(at) for at in study.at] == [240, 40]
    assert ForkStudy(at=[160], steps=7).steps_from(160) == 7
    assert ForkStudy(at=[160]).steps_from(160) == 160
    with pytest.raises(UserError, match=r"fork.steps: 9 steps .* all forks end together \(fork.end=480\)"):
        parse_study({"fork": {"at": [160], "end": 480, "steps": 9, "decay": 80}})
    with pytest.raises(UserError, match=r"fork.end: step 440 .* leaves a fork from step 360 no .*441"):
        parse_study({"fork": {"at": [160, 360], "end": 440, "decay": 80}})


@pytest.mark.parametrize("margin", [0.25, "0.25", "0.25%"])
def test_a_margin_is_a_percentage(margin: float | str) -> None:
    assert parse_margin(margin) == 0.25 == expand("convergence", [f"margin={margin}"]).study.margin


def test_no_run_has_them_and_the_plan_does() -> None:
    words = ["recipe=mxfp8,bf16", "margin=1", "seeds.until=decided", "seeds.max=5", "null_arm=true"]
    sweep_plan = plan(["conf=convergence", *words])
    assert not any(set(point.config) & set(STUDY_KEYS) - {"fork"} for point in sweep_plan.points)
    study = sweep_plan.study
    assert (study.margin, study.seeds.until, study.seeds.max, study.null_arm) == (1, "decided", 5, True)
    assert plan(["conf=parity"]).study == StudyConfig()


@pytest.mark.parametrize(
    ("words", "baseline"),
    [
        (["recipe=mxfp8,bf16"], "bf16"),
        (["recipe=mxfp8,nvfp4"], "mxfp8"),
        (["recipe=mxfp8,nvfp4", "baseline=nvfp4"], "nvfp4"),
        (["recipe=bf16,mxfp8", "train.lr=1e-3,2e-3", "baseline=mxfp8_lr-0.002"], "mxfp8_lr-0.002"),
    ],
)
def test_the_baseline_is_bf16_or_the_first_recipe_or_the_one_that_is_named(words: list[str], baseline: str) -> None:
    assert expand("convergence", words).study.baseline == baseline


def test_the_null_arm_is_one_of_the_baseline_that_is_named() -> None:
    *_, null = expand("convergence", ["recipe=bf16,mxfp8", "null_arm=true", "baseline=mxfp8"]).points
    assert null.arm == "null" and null.config["recipe"]["linear"]["input"] == "mxfp8"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("margin=0", "margin: got 0; it takes a part of the baseline's loss in %, above 0 and at most 100"),
        ("margin=101%", "margin: got '101%'"),
        ("margin=0%tokens", "margin: got '0%tokens'"),
        (
            "margin=some tokens",
            "margin: got 'some tokens'; it takes a part",
        ),
        ("margin=much", "margin: got 'much'"),
        ("margin=nan", "margin: got nan"),
        ("margin=true", "margin: got True"),
        ("margin=1,2", "margin cannot be swept, it belongs to the whole sweep"),
        ("seeds.max=1", "seeds.max: got 1; must be greater than or equal to 2"),
        ("seeds.max=101", "seeds.max: got 101; must be less than or equal to 100"),
        ("seeds.until=bored", "seeds.until: got 'bored'; must be 'fixed' or 'decided'"),
        ("seeds.most=3", "seeds.most: no such key; seeds takes until, max"),
        ("baseline=mxfp9", r"baseline: no arm or recipe 'mxfp9' \(did you mean 'mxfp8'\?\); the grid has bf16, mxfp8"),
    ],
)
def test_what_is_refused(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        expand("convergence", ["recipe=bf16,mxfp8", word])


def test_another_job_has_none_of_them() -> None:
    with pytest.raises(UserError, match="margin: no such key"):
        plan(["conf=parity", "margin=1"])


def test_sweep_json_keeps_them_and_an_older_one_has_none(tmp_path) -> None:
    store = RunStore(tmp_path)
    store.create(sweep="s", conf="c", overrides=[], runs=[])
    assert store.facts("s")["study"] == {}
    study = parse_study({"margin": "1%"}).model_dump(mode="json")
    store.create(sweep="s", conf="c", overrides=[], runs=[], study=study)
    store.create(sweep="s", conf="c", overrides=[], runs=[])
    assert store.facts("s")["study"] == study and study["margin"] == 1
    sweep_file.write(tmp_path / "s", {key: value for key, value in store.facts("s").items() if key != "study"})
    assert store.facts("s")["study"] == {}
