"""What a dry run says: the state of each run, the steps that are left, and the minutes they take."""

import pytest

from hqsweep.study.forecast import pace
from hqsweep.study.outlook import Outlook, outlook
from hqsweep.sweep.engine import launch

WORDS = ("recipe=bf16,mxfp8", "seed=0,1")


def ahead(laboratory, *words: str, force: bool = False) -> Outlook:
    plan = laboratory.plan(*(words or WORDS))
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


def test_without_a_study_on_such_a_device_nothing_is_guessed(laboratory, row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hqsweep.study.outlook.registry", lambda folder: [])
    work = ahead(laboratory)
    assert work.minutes is None and "no comparable study on this kind of device" in work.basis
    assert isinstance(pace(laboratory.plan(*WORDS), [row(device="NVIDIA H200")]), str)
    slow, fast = row(sweeps=["slow"], seconds=4000.0), row(sweeps=["fast"], tokens=7000)
    known = pace(laboratory.plan(*WORDS), [fast, slow])
    assert known.high == pytest.approx(10 * known.low) and known.seconds == known.high and "slow (" in known.basis
    monkeypatch.setattr("hqsweep.study.outlook.registry", lambda folder: [fast, slow])
    work = ahead(laboratory)
    assert (work.minutes, work.most) == pytest.approx((400 / 60, 4000 / 60))


def test_finished_runs_of_another_size_say_nothing(laboratory) -> None:
    laboratory.start(laboratory.plan(*WORDS), False)
    for other in ("model.dim=64", "train.batch=4", "train.context=16"):
        assert ahead(laboratory, *WORDS, other).minutes is None, other
    assert ahead(laboratory, *WORDS, "train.lr=0.5").minutes == pytest.approx(400 / 60)


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
    laboratory.start(laboratory.plan(*WORDS), False)
    (laboratory.folder / "runs/convergence/sweep.json").write_text("[]")
    plan = laboratory.plan(*WORDS)
    launch.check(plan)
    assert states(outlook(plan, plan.rows())) == ["finished"] * 4
