"""What a dry run says: the state of each run, the steps that are left, and the minutes they take."""

import math

import pytest

from hqsweep.study.forecast import pace, registry
from hqsweep.study.outlook import Outlook, outlook
from hqsweep.sweep import launch

WORDS = ("recipe=bf16,mxfp8", "seed=0,1")


def ahead(laboratory, *words: str, force: bool = False) -> Outlook:
    plan = laboratory.plan(*(words or WORDS))
    return outlook(plan, plan.rows(), force=force)


def states(work: Outlook) -> list[str]:
    return [row["state"] for row in work.rows]


def test_of_a_sweep_that_never_ran_all_is_to_do_and_nothing_is_written(laboratory) -> None:
    work = ahead(laboratory)
    assert states(work) == ["to do"] * 4 and work.to_do == 4 and not (laboratory.folder / "runs").exists()
    assert work.minutes > 0 and work.basis.startswith("by ") and "an estimate, of another model" in work.basis


def test_finished_runs_say_how_long_those_take_that_are_left(laboratory) -> None:
    laboratory.start(laboratory.plan("recipe=bf16", "seed=0,1"), False)
    work = ahead(laboratory)
    assert states(work) == ["finished", "finished", "to do", "to do"]
    assert [row["minutes"] for row in work.rows] == pytest.approx([0, 0, 100 / 60, 100 / 60])  # of 100 steps of 1 s
    assert work.minutes == pytest.approx(200 / 60) and work.basis == "by the finished runs of this sweep"
    assert ahead(laboratory, *WORDS, "engine.workers=2").minutes == pytest.approx(100 / 60)
    assert ahead(laboratory, *WORDS, "train.steps=50").minutes == pytest.approx(4 * 50 / 60)  # other runs, as fast


def test_a_killed_run_goes_on_from_its_checkpoint(laboratory) -> None:
    laboratory.start(laboratory.plan(*WORDS), False)
    run = laboratory.start(laboratory.plan(*WORDS), False)[2]
    run.write_status(state="interrupted", reason="stopped by SIGINT")
    run.checkpoint.mkdir()
    for step in (20, 40):
        (run.checkpoint / f"step_{step}.pt").touch()
        (run.checkpoint / f"step_{step}.json").touch()
    work = ahead(laboratory)
    assert states(work) == ["finished", "finished", "to do from step 40", "finished"]
    assert work.to_do == 1 and work.minutes == pytest.approx(1.0)


def test_what_is_damaged_or_forced_is_done_again(laboratory) -> None:
    first, second, *_ = laboratory.start(laboratory.plan(*WORDS), False)
    first.jsonl("metrics").write_text("")
    second.status_path.write_text("[]")
    work = ahead(laboratory)
    assert states(work)[:2] == ["to do again", "to do again"] and work.to_do == 2
    assert states(ahead(laboratory, *WORDS, force=True)) == ["to do again"] * 4


def test_forks_and_trunks_take_their_own_time(laboratory) -> None:
    words = ("recipe=bf16,mxfp8", "fork.at=50", "fork.steps=10", "fork.decay=10")
    laboratory.start(laboratory.plan(*words, "seed=0"), False)
    work = ahead(laboratory, *words, "seed=0,1")
    left = [row for row in work.rows if row["state"] == "to do"]
    assert [row["minutes"] for row in left] == pytest.approx([50 / 60, 20 / 60, 20 / 60])


def test_without_a_study_on_such_a_device_nothing_is_guessed(laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqsweep.study.outlook.registry", lambda folder: [])
    work = ahead(laboratory)
    assert work.minutes is None and "no study on this kind of device" in work.basis
    (row, *_) = registry(laboratory.folder)
    assert pace(laboratory.plan(*WORDS), [row | {"device": "NVIDIA H200"}]) is None
    seconds, basis = pace(laboratory.plan(*WORDS), [row | {"device": "cpu"}])
    assert math.isfinite(seconds) and "on cpu" in basis


def test_a_job_without_steps_is_one_piece_of_work(laboratory) -> None:
    plan = launch.plan(["conf=parity", f"runs_dir={laboratory.folder}"])
    work = outlook(plan, plan.rows())
    assert states(work) == ["to do"] and work.minutes is None


def test_a_damaged_list_of_runs_stops_no_dry_run(laboratory) -> None:
    laboratory.start(laboratory.plan(*WORDS), False)
    (laboratory.folder / "runs/convergence/sweep.json").write_text("[]")
    plan = laboratory.plan(*WORDS)
    launch.check(plan)
    assert states(outlook(plan, plan.rows())) == ["finished"] * 4
