import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

from hqsweep import worker
from hqsweep.config.job import parse
from hqsweep.config.jobs import JOBS
from hqsweep.errors import EXIT_BUSY, UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import Diverged
from hqsweep.sweep.console import PlainDisplay
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.store.run_dir import CANCELLED, RunDir
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

CONFIG = {
    "job": "convergence", "sweep": "tiny",
    "recipe": {"name": "mxfp8", "linear": {"input": "mxfp8", "weight": "mxfp8", "grad_output": "mxfp8"}},
    "model": {"dim": 32, "layers": 1, "heads": 2},
    "data": {"source": "markov", "markov": {"length": 20_000}},
    "train": {"steps": 6, "batch": 2, "context": 32, "log_every": 1, "eval_every": 3, "eval_batches": 1,
              "checkpoint_every": 2, "device": "cpu"},
    "stats": {"every": 3},
}  # fmt: skip


def make_run(root: Path, **changes) -> RunDir:
    config = parse(CONFIG | {"runs_dir": str(root)} | changes).model_dump(mode="json")
    point = SimpleNamespace(config=config, arm="mxfp8", overrides=[])
    return RunStore(root).create(sweep="tiny", conf="tiny", overrides=[], runs=[point])[0]


@pytest.fixture
def run(tmp_path) -> RunDir:
    return make_run(tmp_path / "runs")


@pytest.fixture(autouse=True)
def handlers():
    """pytest's own signal handlers, back again after each test."""
    before = {number: signal.getsignal(number) for number in (*worker.STOP_SIGNALS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job(monkeypatch):
    """job(function) makes `function(config, sink, workspace)` the convergence job."""

    def install(function):
        module = ModuleType("fake_job")
        module.run = function
        monkeypatch.setitem(sys.modules, "fake_job", module)
        monkeypatch.setitem(JOBS, "convergence", replace(JOBS["convergence"], run="fake_job:run"))

    return install


def test_a_finished_run(run, job):
    seen = []

    def work(config, sink, workspace):
        seen.append((config.train.steps, workspace, run.is_locked(), run.status()["state"]))
        sink.metric(1, {"train_loss": 2.5})
        sink.manifest(device="cpu")
        sink.progress(6, 6, 2.5, 100.0)

    job(work)
    assert worker.main([str(run.path)]) == 0
    assert seen == [(6, run.path, True, "running")]
    status, manifest = run.status(), run.manifest()
    assert (status["state"], status["reason"], status["exit_code"], status["attempt"]) == ("finished", None, 0, 1)
    assert status["pid"] == os.getpid() and 0 <= status["seconds"] <= status["ended"] - status["started"] + 0.1
    assert status["progress"]["step"] == 6
    assert manifest["device"] == "cpu" and manifest["versions"]["torch"] and manifest["arm"] == "mxfp8"
    assert pd.read_parquet(run.parquet("metrics"))["value"].tolist() == [2.5]
    assert not run.is_locked()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("two\n  lines"), "RuntimeError: two lines"),
        (KeyError("x"), "KeyError: 'x'"),
        (UserError("data.path: none there; name a file"), "data.path: none there; name a file"),
        (Diverged(37, float("nan"), 0.01), str(Diverged(37, float("nan"), 0.01))),
    ],
)
def test_a_failed_run_says_why_in_one_line_and_keeps_its_rows(run, job, capfd, error, reason):
    def work(config, sink, workspace):
        sink.metric(1, {"train_loss": 2.5})
        raise error

    job(work)
    assert worker.main([str(run.path)]) == 3
    status = run.status()
    assert (status["state"], status["reason"], status["exit_code"]) == ("failed", reason, 3)
    assert len(run.rows("metrics")) == 1
    assert "Traceback" in capfd.readouterr().err


def test_a_run_whose_folder_was_deleted_and_made_again_writes_nothing_into_the_new_one(run, job):
    config = run.config_path.read_text()

    def work(config_, sink, workspace):
        shutil.rmtree(run.path)
        run.path.mkdir()
        run.config_path.write_text(config)

    job(work)
    assert worker.main([str(run.path)]) == 75
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


def test_a_config_that_is_wrong_is_a_failed_run(run):
    run.config_path.write_text(run.config_path.read_text().replace("steps: 6", "steps: none"))
    assert worker.main([str(run.path)]) == 3
    assert "train.steps" in run.status()["reason"]


def test_a_second_attempt_counts_adds_its_time_and_forgets_the_old_reason(run, job):
    job(lambda config, sink, workspace: time.sleep(0.05))
    run.write_status(state="failed", reason="RuntimeError: x", attempt=1, seconds=100.0)
    assert worker.main([str(run.path)]) == 0
    status = run.status()
    assert (status["attempt"], status["reason"]) == (2, None)
    assert 100.05 <= status["seconds"] < 110


def test_a_locked_or_finished_run_is_left_alone(run, job, monkeypatch):
    job(lambda config, sink, workspace: pytest.fail("the job was started"))
    monkeypatch.setattr(worker, "LOCK_WAIT_S", 0.05)
    before = run.status_path.read_bytes()
    with run.lock():
        assert worker.main([str(run.path)]) == EXIT_BUSY
    assert run.status_path.read_bytes() == before
    run.write_status(state="finished")
    assert worker.main([str(run.path)]) == 0


def test_the_tracker_gets_the_tables_and_the_exit_code(run, job, monkeypatch):
    calls = []
    tracker = SimpleNamespace(
        log=lambda step, values: calls.append(("log", step)),
        rewind=lambda step: calls.append(("rewind", step)),
        table=lambda name, rows: calls.append((name, len(rows))),
        finish=lambda exit_code: calls.append(("finish", exit_code, run.written_status()["state"])) or True,
    )
    monkeypatch.setattr(worker, "open_tracker", lambda run: tracker)

    def work(config, sink, workspace):
        sink.metric(1, {"lr": 1.0})
        raise RuntimeError

    job(work)
    worker.main([str(run.path)])
    assert calls == [("log", 1), ("stats", 0), ("what_if", 0), ("parity", 0), ("calibrate", 0), ("finish", 3, "failed")]


@pytest.mark.parametrize("number", worker.STOP_SIGNALS)
def test_a_stopped_run_is_interrupted_even_if_the_exception_is_dropped_once(run, job, number):
    def work(config, sink, workspace):
        with contextlib.suppress(BaseException):  # as Python does for a destructor
            os.kill(os.getpid(), number)
            time.sleep(10)
        time.sleep(10)

    job(work)
    began = time.monotonic()
    assert worker.main([str(run.path)]) == 128 + number
    assert time.monotonic() - began < 5
    assert (run.status()["state"], run.status()["reason"]) == ("interrupted", f"stopped by {number.name}")
    assert signal.getsignal(number) == signal.SIG_IGN
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_stopped_run_goes_on_to_the_rows_of_an_uninterrupted_one(tmp_path, job):
    whole, cut = make_run(tmp_path / "whole"), make_run(tmp_path / "cut")
    assert worker.main([str(whole.path)]) == 0

    def stopped_after_step_5(config, sink, workspace):
        metric = sink.metric

        def metric_then_stop(step, values):
            metric(step, values)
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        sink.metric = metric_then_stop
        convergence.run(config, sink, workspace)

    job(stopped_after_step_5)
    assert worker.main([str(cut.path)]) == 143
    assert cut.rows("metrics")[-1]["step"] == 5
    job(convergence.run)
    assert worker.main([str(cut.path)]) == 0
    assert cut.status()["attempt"] == 2
    for table in ("metrics", "stats"):
        assert cut.jsonl(table).read_bytes() == whole.jsonl(table).read_bytes() != b""


def test_the_engine_starts_this_worker(run):
    (status,) = run_local([run], display=PlainDisplay(Console(file=io.StringIO())), limits=Limits(threads=1))
    assert (status["state"], status["reason"]) == ("finished", None), run.log.read_text()
    assert run.manifest()["threads"] == 1
    assert run.manifest()["params"] > 0
    assert pd.read_parquet(run.parquet("metrics"))["step"].max() == 6


def test_a_worker_whose_parent_is_another_stops(run):
    command = [sys.executable, "-m", "hqsweep.worker", str(run.path), "--parent", "1"]
    assert subprocess.run(command, timeout=60, check=False).returncode in (143, -signal.SIGTERM)
    assert not run.is_locked() and run.status()["state"] in ("pending", "interrupted")


def test_a_worker_by_hand_needs_a_folder():
    done = subprocess.run([sys.executable, "-m", "hqsweep.worker"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "run_dir is missing" in done.stderr


def test_a_clock_that_jumps_back_disturbs_no_run(run, job, monkeypatch):
    clock = iter([2e9, 1e9])
    monkeypatch.setattr(worker.time, "time", lambda: next(clock, 0.5e9))
    job(lambda config, sink, workspace: sink.metric(1, {"lr": 1.0}))
    assert worker.main([str(run.path)]) == 0
    status = run.status()
    assert (status["state"], status["started"] > status["ended"]) == ("finished", True)
    assert 0 <= status["seconds"] < 60


def test_a_cancelled_run_is_not_begun(run, job):
    job(lambda config, sink, workspace: pytest.fail("the job was started"))
    run.write_status(state="interrupted", reason=CANCELLED)
    assert worker.main([str(run.path)]) == 0
    assert run.status()["state"] == "interrupted"
