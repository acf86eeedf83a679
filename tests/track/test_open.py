"""A tracker that hangs, or opens too late, holds up no run; a report goes to the tracker of its runs, if any."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from hqsweep.sweep.store.store import RunStore
from hqsweep.track import open as opening
from hqsweep.track.open import BackgroundTracker, mirror_report


class Slow:
    """Keeps what it is given; waits at the gate before it takes anything."""

    def __init__(self):
        self.gate, self.calls = threading.Event(), []

    def _take(self, *call):
        self.gate.wait(10)
        self.calls.append(call)
        return True

    def log(self, step, values):
        self._take(step, values)

    def rewind(self, step):
        self._take("rewind", step)

    def sampled(self, step, rows):
        self._take("sampled", step, rows)

    def table(self, name, rows):
        self._take(name, rows)

    def finish(self, exit_code):
        return self._take("finish", exit_code)


@pytest.fixture
def slow():
    slow = Slow()
    yield slow
    slow.gate.set()


def test_calls_are_made_in_order_while_the_tracker_is_still_opening(slow):
    opening = threading.Event()

    def opened():
        opening.wait(10)
        return slow

    tracker, began = BackgroundTracker(opened), time.monotonic()
    values = {"loss": 1.0}
    tracker.rewind(0)
    tracker.sampled(1, [{"layer": "a"}])
    tracker.log(1, values)
    values["loss"] = 2.0  # the caller's own again
    tracker.table("stats", [])
    assert time.monotonic() - began < 1
    slow.gate.set()
    opening.set()
    assert tracker.finish(3) is True
    sampled = ("sampled", 1, [{"layer": "a"}])
    assert slow.calls == [("rewind", 0), sampled, (1, {"loss": 1.0}), ("stats", []), ("finish", 3)]


def test_a_tracker_that_hangs_is_left_behind(slow, monkeypatch, capsys):
    monkeypatch.setattr(opening, "FINISH_TIMEOUT_S", 0.05)
    tracker = BackgroundTracker(lambda: slow)
    tracker.log(1, {"loss": 1.0})
    assert tracker.finish(0) is False
    assert "not finished in 0.05 s; `hqsweep sync` makes up for it" in capsys.readouterr().out


def test_what_does_not_fit_is_dropped_and_said_once(slow, monkeypatch, capsys):
    monkeypatch.setattr(opening, "QUEUE", 2)
    monkeypatch.setattr(opening, "FINISH_TIMEOUT_S", 0.05)
    tracker, began = BackgroundTracker(lambda: slow), time.monotonic()
    for step in range(100):
        tracker.log(step, {"loss": 1.0})
        tracker.sampled(step, [])
    assert not tracker.finish(0)
    assert time.monotonic() - began < 1
    assert capsys.readouterr().out.count("does not keep up") == 1


ARM = {"arm": "nvfp4", "verdict": "worse", "gap": 1.5, "ci_low": 1.0, "ci_high": 2.0, "margin": 0.25}
ARM |= {"within_margin": False, "n": 4, "sentence": "worse than 'bf16' by 1.5 %."}
TRACK = {"mode": "offline", "project": "hqsweep", "entity": None, "init_timeout_s": 2}


@pytest.fixture
def runs_of(tmp_path, monkeypatch):
    """runs_of(kind) -> the runs of a sweep whose `track` section is of that kind."""
    for name in ("DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb"))

    def runs(kind):
        config = {"job": "parity", "sweep": "grid", "seed": 0, "track": TRACK | {"kind": kind}}
        point = SimpleNamespace(config=config, arm="nvfp4", overrides=[])
        return RunStore(tmp_path / "runs").create(sweep="grid", conf="c", overrides=[], runs=[point])

    return runs


def test_runs_without_a_tracker_or_without_its_package_keep_the_report_where_it_is(runs_of, tmp_path, monkeypatch):
    assert not mirror_report(runs_of("none"), tmp_path, [ARM])
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    assert not mirror_report(runs_of("wandb"), tmp_path, [ARM])


def test_wandb_gets_the_verdicts_and_the_report(runs_of, tmp_path):
    pytest.importorskip("wandb")
    from support.track import wandb_file

    report = tmp_path / "report"
    report.mkdir()
    (report / "report.html").write_text("<html>")
    runs = runs_of("wandb")
    assert mirror_report(runs, report, [ARM])
    (folder,) = (runs[0].sweep_path / "wandb").glob("offline-run-*")
    record = wandb_file.load(folder)
    assert record.summary["verdict/nvfp4"] == "worse" and record.summary["gap_pct/nvfp4"] == 1.5
    (table,) = [row["verdicts.path"] for row in record.history if "verdicts.path" in row]
    assert json.loads((folder / "files" / table).read_text())["data"] == [list(ARM.values())]
