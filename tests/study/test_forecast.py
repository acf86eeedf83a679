"""What a study would cost: from the nearest row of the registry, in replicates and minutes."""

import math

import pytest

from hqsweep.errors import Damaged, UserError
from hqsweep.study import forecast
from hqsweep.study.forecast import forecasts, registry
from hqsweep.study.noise import parameters
from hqsweep.sweep import launch
from hqsweep.sweep.files import encode_rows
from hqsweep.verdicts import plan as power

WORDS = ("recipe=bf16,mxfp8,nvfp4", "null_arm=true", "seed=0")
STEP = 2 * 32  # tokens of a step of the laboratory


@pytest.fixture
def row(laboratory):
    """row(**changes) -> a row of the registry, of the laboratory's model and data."""

    def make(**changes):
        config = laboratory.plan(*WORDS).first
        arm = {"sd": 0.02, "gap_pct": 1.0}
        return {
            "model": config.model.model_dump(mode="json"), "params": parameters(config),
            "data": config.data.model_dump(mode="json"), "data_hash": config.data.hash, "tokens": 100 * STEP,
            "design": "whole run", "points": 1, "baseline": "bf16", "sd": 0.02, "sd_pct": 1.0,
            "arms": {"mxfp8": {"sd_pct": 0.6, "null": False, **arm}, "nvfp4": {"sd_pct": 1.3, "null": False, **arm},
                     "null": {"sd_pct": 0.1, "null": True, **arm}},
            "replicates": 4, "run_tokens": 100 * STEP, "trunk_tokens": 0, "seconds": 400.0, "arms_run": 4,
            "device": "cpu", "date": "2026-11-22", "sweeps": ["stdlib"], "runs": "0" * 64,
        } | changes  # fmt: skip

    return make


def forks(row, **changes):
    of_forks = {"design": "fork", "points": 2, "run_tokens": 2 * 20 * STEP, "trunk_tokens": 60 * STEP, "seconds": 220.0}
    return row(**(of_forks | changes))


def test_replicates_are_those_of_the_verdicts_and_minutes_those_of_the_tokens(laboratory, row):
    (estimate,) = forecasts(laboratory.plan(*WORDS), 1.0, [row()])
    assert estimate.replicates == power.replicates("whole runs", 1.0, 2, gap=1.0)
    assert estimate.half_width == power.half_width("whole runs", 1.0, 2, int(estimate.replicates))
    assert estimate.minutes == pytest.approx(estimate.replicates * 400 / 60)
    assert (estimate.design, estimate.arms, estimate.sd_pct, estimate.estimate) == ("whole runs", 2, 1.0, False)
    assert estimate.basis == "stdlib (4 seeds on cpu, 2026-11-22): the same model and data"
    (more,) = forecasts(laboratory.plan("recipe=bf16,mxfp8,nvfp4,mxfp4", "null_arm=true"), 1.0, [row()])
    assert more.arms == 3 and more.minutes / more.replicates == pytest.approx(5 * 100 / 60)


def test_of_forks_the_loudest_arm_of_the_plan_decides(laboratory, row):
    (estimate,) = forecasts(laboratory.plan(*WORDS), 1.0, [forks(row)])
    assert estimate.replicates == power.replicates("forks", 1.3, 2, gap=1.0)
    assert estimate.minutes == pytest.approx(estimate.replicates * 220 / 60)
    (quiet,) = forecasts(laboratory.plan("recipe=bf16,mxfp8"), 1.0, [forks(row)])
    assert quiet.sd_pct == 0.6 and quiet.replicates == power.replicates("forks", 0.6, 1, gap=1.0)
    assert quiet.minutes / quiet.replicates == pytest.approx((60 + 2 * 40) / 60), "a trunk and the forks of two arms"
    (unknown,) = forecasts(laboratory.plan("recipe=bf16,mxfp4"), 1.0, [forks(row)])
    assert unknown.sd_pct == 1.3


def test_the_cheaper_design_comes_first(laboratory, row):
    plan = laboratory.plan(*WORDS)
    assert [each.design for each in forecasts(plan, 1.0, [row(), forks(row)])] == ["forks", "whole runs"]
    slow = forks(row, seconds=50_000.0)
    assert [each.design for each in forecasts(plan, 1.0, [row(), slow])] == ["whole runs", "forks"]
    hopeless = forecasts(plan, 1e-4, [row(), forks(row)])
    assert all(math.isinf(each.replicates) and math.isinf(each.minutes) for each in hopeless)


def test_the_nearest_study_is_taken_and_an_estimate_says_so(laboratory, row):
    plan = laboratory.plan(*WORDS)
    same, late = row(tokens=400 * STEP, sweeps=["late"]), row(tokens=50 * STEP, sweeps=["near"])
    other = row(model={**row()["model"], "dim": 64}, sweeps=["other"], params=2 * row()["params"])
    far = row(model={**row()["model"], "dim": 640}, sweeps=["far"], params=90 * row()["params"])
    assert forecasts(plan, 1.0, [far, other, same, late])[0].basis.startswith("near (")
    (forecast_of_plan,) = forecasts(plan, 1.0, [far, same, other])
    assert forecast_of_plan.basis.startswith("late (") and forecast_of_plan.basis.endswith(
        "data, at 25.6k tokens where this is at 6.4k"
    )
    (estimate,) = forecasts(plan, 1.0, [far, other])
    assert estimate.estimate and estimate.basis.startswith("other (")
    assert "an estimate, of another model or other data, " in estimate.basis
    assert estimate.minutes == pytest.approx(estimate.replicates * 400 / 60 / 2), "half of the parameters"


def test_a_study_on_the_same_kind_of_device_goes_first_and_minutes_of_another_are_said(laboratory, row):
    plan = laboratory.plan(*WORDS, "train.device=cpu")
    of_gpu = row(model={}, device="NVIDIA H200")
    of_cpu = row(model={}, params=100 * row()["params"], sweeps=["far"])
    (forecast,) = forecasts(plan, 1.0, [of_gpu, of_cpu])
    assert forecast.basis.startswith("far (") and "that device" not in forecast.basis
    (forecast,) = forecasts(plan, 1.0, [of_gpu])
    assert "; minutes are those of that device, not of this machine" in forecast.basis


def test_a_gap_of_one_control_is_louder(laboratory, row):
    """Without a null arm a gap is to the baseline alone: 2 variances instead of 1.5."""
    (estimate,) = forecasts(laboratory.plan("recipe=bf16,mxfp8,nvfp4"), 1.0, [row()])
    assert estimate.sd_pct == pytest.approx(math.sqrt(2 / 1.5))


def test_a_growing_study_is_planned_at_its_levels(laboratory, row):
    words = (*WORDS, "seeds.until=decided", "seeds.max=8")
    (estimate,) = forecasts(laboratory.plan(*words), 3.0, [row()])
    assert estimate.replicates == power.replicates("whole runs", 1.0, 2, gap=3.0, maximum=8)
    assert estimate.half_width == power.half_width("whole runs", 1.0, 2, int(estimate.replicates), True, 8)


def test_a_plan_needs_two_arms_and_a_job_that_trains(laboratory, row):
    with pytest.raises(UserError, match=r"one arm, and no other to measure; add recipes"):
        forecasts(laboratory.plan("recipe=bf16", "null_arm=true"), 1.0, [row()])
    with pytest.raises(UserError, match=r"conf=parity: a parity job compares no recipes"):
        forecasts(launch.plan(["conf=parity"]), 1.0, [row()])


def test_rows_of_the_package_come_after_those_measured_here(tmp_path, monkeypatch, row):
    monkeypatch.setattr(forecast, "PACKAGED", tmp_path / "package")
    with pytest.raises(UserError, match=r"no study has measured its noise yet .*`hqsweep run conf=fork`, then"):
        registry(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/noise.jsonl").write_bytes(encode_rows([row(sweeps=["package"])]))
    assert [each["sweeps"] for each in registry(tmp_path)] == [["package"]]
    (tmp_path / "noise.jsonl").write_bytes(encode_rows([row(sweeps=["here"])]))
    assert [each["sweeps"] for each in registry(tmp_path)] == [["here"], ["package"]]


def test_a_fork_study_is_planned_from_its_own_points(laboratory, row):
    words = (*WORDS, "fork.at=40,80", "fork.steps=10", "fork.decay=10", "fork.warmup=5")
    estimates = forecasts(laboratory.plan(*words), 1.0, [forks(row, tokens=80 * STEP), row()])
    by_forks, from_scratch = sorted(estimates, key=lambda each: each.design)
    assert by_forks.basis.endswith("the same model and data")
    assert by_forks.minutes / by_forks.replicates == pytest.approx((80 + 4 * 2 * 20) / 60)
    assert from_scratch.minutes / from_scratch.replicates == pytest.approx(4 * 80 / 60), "as long as trunk and fork"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"params": None}, "has None under 'params', where a number belongs"),
        ({"tokens": 0}, "has a number of .* that is not above 0"),
        ({"arms": {"nvfp4": {"sd_pct": 0.1}}}, "has no key 'null'"),
        ({"arms": {}}, "holds None where a mapping"),
        ({"model": []}, "has a list of 0 under 'model'"),
    ],
)
def test_a_row_that_no_comparison_wrote_is_named_with_its_line(tmp_path, row, changes, fault):
    (tmp_path / "noise.jsonl").write_bytes(encode_rows([row(), row(**changes)]))
    with pytest.raises(Damaged, match=f"noise.jsonl: line 2: {fault}.*; delete that line"):
        registry(tmp_path)
