"""What a study would cost: from the nearest row of the registry, in replicates and minutes."""

import math

import pytest

from hqsweep.errors import Damaged, UserError
from hqsweep.study import forecast
from hqsweep.study.forecast import Outlook, forecasts, not_used, outlook, pace, registry
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.files import encode_rows
from hqsweep.verdicts import plan as power

WORDS = ("recipe=bf16,mxfp8,nvfp4", "null_arm=true", "seed=0")
STEP = 2 * 32  # tokens of a step of the laboratory


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
    far = row(model={**row()["model"], "dim": 640}, sweeps=["far"], params=4 * row()["params"])
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
    of_cpu = row(model={}, params=3 * row()["params"], sweeps=["far"])
    (forecast,) = forecasts(plan, 1.0, [of_gpu, of_cpu])
    assert forecast.basis.startswith("far (") and "that device" not in forecast.basis
    (forecast,) = forecasts(plan, 1.0, [of_gpu])
    assert "; minutes are those of that device, not of this machine" in forecast.basis


FAR = [
    ({"trained": False}, "its runs are barely trained"),
    ({"trained": None}, "it does not say whether its runs were trained, which `hqsweep compare` measures again"),
    ({"params": 70_000}, "5.06 times as many parameters"),
    ({"tokens": 1280}, "5 times fewer tokens"),
    ({"data": {"source": "stdlib"}}, "other data (stdlib)"),
    ({"data": {"source": "markov", "markov": {"vocab": 64}}}, "other data (markov)"),
    ({"model": {"kind": "hf"}}, "another kind of model"),
    ({"model": {"experts": 4}}, "another kind of model"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "why"), FAR)
def test_a_study_that_is_not_comparable_is_said_and_not_used(laboratory, row, changes, why):
    plan, far = laboratory.plan(*WORDS), row(sd_pct=0.01, sweeps=["toy"], **changes)
    with pytest.raises(UserError, match="no study of a comparable model, data and number of tokens") as error:
        forecasts(plan, 1.0, [far])
    said = f"whole runs: not used: toy (4 seeds on cpu, 2026-11-22): {why}"
    assert said in str(error.value) and not_used(plan, [far, row()]) == [said]
    (estimate,) = forecasts(plan, 1.0, [far, row()])
    assert (estimate.studies, estimate.sd_pct) == (1, 1.0) and estimate.replicates_low == estimate.replicates_high


def test_comparable_studies_give_a_range_around_the_nearest(laboratory, row):
    quiet, loud = row(sd_pct=0.5, tokens=200 * STEP, seconds=100.0), row(sd_pct=2.0, tokens=300 * STEP)
    (estimate,) = forecasts(laboratory.plan(*WORDS), 1.0, [loud, row(), quiet])
    counts = [power.replicates("whole runs", sd, 2, gap=1.0) for sd in (0.5, 1.0, 2.0)]
    assert [estimate.replicates_low, estimate.replicates, estimate.replicates_high] == counts and estimate.studies == 3
    assert estimate.minutes_low == pytest.approx(counts[0] * 100 / 60)
    assert estimate.minutes_high == pytest.approx(counts[2] * 400 / 60)


def test_forks_of_another_length_or_without_an_arm_under_test_are_far(laboratory, row):
    plan = laboratory.plan(*WORDS, "fork.at=40,80", "fork.steps=10", "fork.decay=10", "fork.warmup=5")
    near, long = forks(row, tokens=80 * STEP), forks(row, tokens=80 * STEP, run_tokens=400 * STEP)
    alone = forks(row, tokens=80 * STEP, arms={"null": {"sd_pct": 0.01, "null": True}})
    assert [each.studies for each in forecasts(plan, 1.0, [near, long, alone])] == [1]
    (line,) = not_used(plan, [near, long, alone])
    assert "10 times as many tokens after the fork" in line and "it has no arm but the null arm" in line


def test_forks_that_end_together_are_planned_from_such_forks_alone(laboratory, row):
    words = (*WORDS, "fork.at=40,60", "fork.decay=10", "fork.warmup=5")
    apart, together = (forks(row, tokens=70 * STEP, run_tokens=40 * STEP, ends_together=end) for end in (False, True))
    (of_end,) = forecasts(laboratory.plan(*words, "fork.end=75"), 1.0, [apart, together | {"sweeps": ["ends"]}])
    assert of_end.basis.startswith("ends")
    (of_steps,) = forecasts(laboratory.plan(*words, "fork.steps=10"), 1.0, [together, apart | {"sweeps": ["apart"]}])
    assert of_steps.basis.startswith("apart")
    lines = not_used(laboratory.plan(*words, "fork.end=75"), [apart])
    assert "its forks do not end together (fork.end)" in lines[0]


MARGINS = [("3%", None, 3.0), ("100%tokens", 4.0, 4.0), ("1%tokens", None, math.nan)]


@pytest.mark.parametrize(("margin", "slope", "percent"), MARGINS)
def test_a_study_that_settles_is_planned_to_the_margin(laboratory, row, margin, slope, percent):
    words = (*WORDS, "fork.at=40,60", "fork.decay=10", "fork.warmup=5", "fork.end=75", "fork.until=settled")
    near = forks(row, tokens=70 * STEP, run_tokens=40 * STEP, ends_together=True, slope_pct=slope)
    (estimate,) = forecasts(laboratory.plan(*words, f"margin={margin}", "fork.max_steps=2600"), 1.0, [near])
    assert estimate.maximum == 10 and estimate.margin_pct == pytest.approx(percent, nan_ok=True)
    expected = percent if math.isnan(percent) else power.to_settle(1.3, 2, percent, 10)
    assert estimate.to_settle == pytest.approx(expected, nan_ok=True)
    (fixed,) = forecasts(laboratory.plan(*words[:-1]), 1.0, [near])
    assert math.isnan(fixed.to_settle) and fixed.maximum is None


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


TWO_SEEDS = ("recipe=bf16,mxfp8", "seed=0,1")


def ahead(laboratory, *words: str, force: bool = False) -> Outlook:
    plan = laboratory.plan(*(words or TWO_SEEDS))
    return outlook(plan, plan.rows(), force=force)


def states(work: Outlook) -> list[str]:
    return [row["state"] for row in work.rows]


def test_of_a_sweep_that_never_ran_all_is_to_do_and_nothing_is_written(laboratory) -> None:
    work = ahead(laboratory)
    assert states(work) == ["to do"] * 4 and work.to_do == 4 and not (laboratory.folder / "runs").exists()
    assert work.minutes is None and work.basis.startswith("no run like these has finished in this sweep, and no ")
    assert "ci (4 trunks on cpu, 2026-11-22): 7.78 times as many parameters, " in work.basis


def test_finished_runs_say_how_long_those_take_that_are_left(laboratory) -> None:
    laboratory.start(laboratory.plan("recipe=bf16", "seed=0,1"), False)
    work = ahead(laboratory)
    assert states(work) == ["finished", "finished", "to do", "to do"]
    assert [row["minutes"] for row in work.rows] == pytest.approx([0, 0, 100 / 60, 100 / 60])  # of 100 steps of 1 s
    assert work.minutes == pytest.approx(200 / 60) and work.basis == "by the finished runs of this sweep"
    assert ahead(laboratory, *TWO_SEEDS, "engine.workers=2").minutes == pytest.approx(100 / 60)
    assert ahead(laboratory, *TWO_SEEDS, "train.steps=50").minutes == pytest.approx(4 * 50 / 60)  # other runs, as fast


def test_a_killed_run_goes_on_from_its_checkpoint(laboratory) -> None:
    laboratory.start(laboratory.plan(*TWO_SEEDS), False)
    run = laboratory.start(laboratory.plan(*TWO_SEEDS), False)[2]
    run.write_status(state="interrupted", reason="stopped by SIGINT")
    run.checkpoint.mkdir()
    for step in (20, 40):
        (run.checkpoint / f"step_{step}.pt").touch()
        (run.checkpoint / f"step_{step}.json").touch()
    work = ahead(laboratory)
    assert states(work) == ["finished", "finished", "to do from step 40", "finished"]
    assert work.to_do == 1 and work.minutes == pytest.approx(1.0)


def test_what_is_damaged_or_forced_is_done_again(laboratory) -> None:
    first, second, *_ = laboratory.start(laboratory.plan(*TWO_SEEDS), False)
    first.jsonl("metrics").write_text("")
    second.status_path.write_text("[]")
    work = ahead(laboratory)
    assert states(work)[:2] == ["to do again", "to do again"] and work.to_do == 2
    assert states(ahead(laboratory, *TWO_SEEDS, force=True)) == ["to do again"] * 4


def test_forks_and_trunks_take_their_own_time(laboratory) -> None:
    words = ("recipe=bf16,mxfp8", "fork.at=50", "fork.steps=10", "fork.decay=10")
    laboratory.start(laboratory.plan(*words, "seed=0"), False)
    work = ahead(laboratory, *words, "seed=0,1")
    left = [row for row in work.rows if row["state"] == "to do"]
    assert [row["minutes"] for row in left] == pytest.approx([50 / 60, 20 / 60, 20 / 60])


def test_without_a_study_on_such_a_device_nothing_is_guessed(laboratory, row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqsweep.study.forecast.registry", lambda folder: [])
    work = ahead(laboratory)
    assert work.minutes is None and "no comparable study on this kind of device" in work.basis
    assert isinstance(pace(laboratory.plan(*TWO_SEEDS), [row(device="NVIDIA H200")]), str)
    slow, fast = row(sweeps=["slow"], seconds=4000.0), row(sweeps=["fast"], tokens=7000)
    known = pace(laboratory.plan(*TWO_SEEDS), [fast, slow])
    assert known.high == pytest.approx(10 * known.low) and known.seconds == known.high and "slow (" in known.basis
    monkeypatch.setattr("hqsweep.study.forecast.registry", lambda folder: [fast, slow])
    work = ahead(laboratory)
    assert (work.minutes, work.most) == pytest.approx((400 / 60, 4000 / 60))


def test_finished_runs_of_another_size_say_nothing(laboratory) -> None:
    laboratory.start(laboratory.plan(*TWO_SEEDS), False)
    for other in ("model.dim=64", "train.batch=4", "train.context=16"):
        assert ahead(laboratory, *TWO_SEEDS, other).minutes is None, other
    assert ahead(laboratory, *TWO_SEEDS, "train.lr=0.5").minutes == pytest.approx(400 / 60)


def test_a_damaged_registry_is_named_and_gives_no_minutes(laboratory) -> None:
    (laboratory.folder / "runs").mkdir()
    (laboratory.folder / "runs/noise.jsonl").write_text("garbage\n{}\n")
    work = ahead(laboratory)
    assert work.minutes is None and "noise.jsonl: line 1 is not JSON; delete that line; hqsweep compare" in work.basis


def test_a_job_without_steps_is_one_piece_of_work(laboratory) -> None:
    plan = launch.plan(["conf=parity", f"runs_dir={laboratory.folder}"])
    work = outlook(plan, plan.rows())
    assert states(work) == ["to do"] and work.minutes is None


def test_a_damaged_list_of_runs_stops_no_dry_run(laboratory) -> None:
    laboratory.start(laboratory.plan(*TWO_SEEDS), False)
    (laboratory.folder / "runs/convergence/sweep.json").write_text("[]")
    plan = laboratory.plan(*TWO_SEEDS)
    launch.check(plan)
    assert states(outlook(plan, plan.rows())) == ["finished"] * 4
