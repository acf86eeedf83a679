"""`--until`: which runs start before a time, by what comparable ones took; with workers that need no torch."""

import pytest
from support.sweep import fake_worker
from support.sweep.shown import Shown

from hqsweep.errors import UserError
from hqsweep.sweep.engine import process
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.task import Until, seconds_of


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    monkeypatch.setattr(process, "GRACE_S", 0.5)


def states(runs):
    return [run.status()["state"] for run in runs]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("2h", 7200), ("1h30m", 5400), ("0.5m", 30)])
def test_a_time_has_units(text, seconds):
    assert seconds_of(text, "until") == seconds


@pytest.mark.parametrize("text", ["", "20", "0s", "-3m", "3d", "1h20", "m", "1 h", "9" * 400 + "h", None, 20])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UserError, match=r"^--until: got .*; it takes a time above 0 with its unit, such as 90s"):
        Until(text)


def test_a_run_starts_if_the_last_comparable_one_took_no_longer_than_is_left(make_forks):
    trunk, *forks = make_forks("trunk", "quick", "quick")
    own, other = forks[0], forks[2]  # of arm0 and arm1
    until = Until("100s")
    assert until.expected(own) is None and until.allows(own)
    until.learn(other, 300.0)
    assert until.expected(own) == 300 and not until.allows(own) and until.allows(trunk)
    until.learn(own, 60.0)
    assert until.allows(own) and until.expected(other) == 300 and not until.allows(other)
    other.write_status(progress={"step": 2, "steps": 3})  # from step 1 on, so that half of it is done
    assert until.expected(other) == 150
    other.write_status(progress={"step": 3, "steps": 3})
    assert until.allows(other)
    until._end = 0.0
    assert not any(map(until.allows, (trunk, own, other))) and until.left == 0


@pytest.mark.slow
def test_runs_for_which_no_time_is_left_stay_pending_and_the_same_call_does_them(make_forks):
    _, *forks = runs = make_forks("trunk", "quick")
    forks[1].write_status(state="interrupted", reason="stopped by SIGTERM")
    until, display = Until("1h"), Shown()
    until.learn(forks[0], 7200.0)
    run_local(runs, display=display, limits=Limits(workers=2, until=until))
    assert states(runs) == ["finished", "pending", "pending"] and not (forks[0].path / "starts").exists()
    said = f"--until: 2 runs are not started: {forks[0].name} would take about 7200 s, and 3"
    assert any(line.startswith(said) for line in display.lines)
    run_local(runs, display=display, limits=Limits(workers=2, until=Until("1h")))
    assert states(runs) == ["finished"] * 3


@pytest.mark.slow
def test_when_the_time_is_over_nothing_starts_and_what_runs_ends(make_runs, make_forks):
    runs, until = make_runs("waits", "quick"), Until("1h")

    class Over(Shown):
        def update(self, run, status):
            if status["state"] == "running":
                until._end = 0.0
                (runs[0].path.parent / "go").touch()
            super().update(run, status)

    display = Over()
    run_local(runs, display=display, limits=Limits(workers=1, until=until))
    assert states(runs) == ["finished", "pending"]
    assert "--until: 1 run is not started, as the time is over" in display.lines
    run_local(runs, display=display, limits=Limits(workers=1, until=until), force=True)
    assert states(runs) == ["finished", "pending"] and (runs[0].path / "product").exists()
    assert "--until: 2 runs are not started, as the time is over" in display.lines
    forks = make_forks("trunk", "quick")
    run_local(forks, display=display, limits=Limits(workers=1, until=until))
    assert states(forks) == ["pending"] * 3


@pytest.mark.slow
def test_forks_are_put_off_with_their_trunk_and_shorter_runs_start(make_forks):
    runs = make_forks("trunk", "quick", seeds=2)
    run_local(runs[:1], display=Shown())
    until = Until("1h")
    until.learn(runs[1], 7200.0)
    run_local(runs[1:], display=Shown(), limits=Limits(workers=1, until=until))
    done = ["finished" if run.trunk() == runs[0] else "pending" for run in runs[1:]]
    assert states(runs[1:]) == done and done.count("finished") == 2
