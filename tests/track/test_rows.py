import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pandas as pd
import pytest

from hqsweep.config.jobs import TABLES
from hqsweep.sweep.store.files import read_json
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.rows import RowSink
from hqsweep.track.tracker import NullTracker
from hqsweep.train.record import mark_of


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "sweep" / "run")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def sink(run):
    sink = RowSink(run, NullTracker())
    yield sink
    sink.close()


def stats_row(step, **changes):
    named = {"step": step, "layer": "l", "tensor": "x", "direction": "rowwise", "format": "mxfp8"}
    return dict.fromkeys(TABLES["stats"]) | named | changes


def parity_row(case):
    named = {"check": "c", "subject": "s", "case": case, "status": "PASS"}
    return dict.fromkeys(TABLES["parity"]) | named | {"mismatches": 0}


def test_rows_are_on_disk_when_the_call_returns(run, sink):
    sink.metric(3, {"train_loss": 2.5, "lr": 1e-3})
    assert run.rows("metrics") == [
        {"step": 3, "metric": "train_loss", "value": 2.5},
        {"step": 3, "metric": "lr", "value": 1e-3},
    ]
    sink.rows("stats", [stats_row(3)])
    sink.rows("parity", [parity_row("a")])
    assert (len(run.rows("stats")), len(run.rows("parity"))) == (1, 1)


def test_statistics_reach_the_tracker_as_they_are_sampled_and_what_is_taken_back_is_said(run):
    calls = []

    class Kept(NullTracker):
        def rewind(self, step):
            calls.append(("rewind", step))

        def log(self, step, values):
            calls.append((step, dict(values)))

        def sampled(self, step, rows):
            calls.append((step, [row["layer"] for row in rows]))

    sink = RowSink(run, Kept())
    sink.rewind({})
    sink.rows("stats", iter([stats_row(3), stats_row(3, layer="m"), stats_row(4)]))
    marks = sink.mark(3)
    sink.metric(4, {"train_loss": 1.0})
    sink.rows("parity", [parity_row("a")])
    sink.rewind(marks, 3)
    sink.close()
    assert calls == [("rewind", -1), (3, ["l", "m"]), (4, ["l"]), (4, {"train_loss": 1.0}), ("rewind", 3)]
    assert len(run.rows("stats")) == 2


def test_no_rows_no_file(run, sink):
    sink.rows("stats", [])
    sink.write_parquet()
    assert list(run.path.iterdir()) == []


def test_scalars_of_numpy_and_torch_are_numbers(run, sink):
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    sink.metric(0, {"train_loss": torch.tensor(1.5)})
    sink.rows("stats", [stats_row(0, amax=np.float32(0.5), cosine=torch.tensor(1.0))])
    assert run.rows("metrics")[0]["value"] == 1.5
    assert (run.rows("stats")[0]["amax"], run.rows("stats")[0]["cosine"]) == (0.5, 1.0)


def test_a_row_with_other_columns_is_refused_by_name(sink):
    row = stats_row(0)
    row["sqnr"] = row.pop("sqnr_db")
    with pytest.raises(ValueError, match=r"stats\.jsonl: .* wrong columns; missing or unknown: sqnr, sqnr_db"):
        sink.rows("stats", [row])


def test_rewind_drops_later_rows_and_appending_goes_on(run, sink):
    marks = None
    for step in range(5):
        sink.metric(step, {"train_loss": float(step)})
        sink.rows("stats", [stats_row(step)])
        marks = sink.mark() if step == 2 else marks
    assert marks == sink.mark(2)
    sink.rows("parity", [parity_row("a")])
    assert sink.fits(marks) is None
    sink.rewind(marks, 2)
    sink.metric(3, {"train_loss": 30.0})
    assert [row["value"] for row in run.rows("metrics")] == [0.0, 1.0, 2.0, 30.0]
    assert [row["step"] for row in run.rows("stats")] == [0, 1, 2]
    assert run.rows("parity") == []
    sink.rewind({})
    assert [run.jsonl(table).exists() for table in ("metrics", "stats", "parity")] == [False] * 3


def test_a_mark_is_that_of_the_file_and_the_file_is_on_the_disk(run, sink, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    for step in range(3):
        sink.metric(step, {"train_loss": math.nan, "lr": 1e-3 / 3})
        sink.rows("stats", [stats_row(step)])
    marks = sink.mark()
    assert synced == [str(run.jsonl("metrics")), str(run.jsonl("stats")), str(run.path)]
    assert marks == {table: mark_of(run.jsonl(table).read_bytes()) for table in ("metrics", "stats")}
    assert marks["metrics"]["rows"] == 6 and marks["stats"]["rows"] == 3
    again = RowSink(run, NullTracker())
    assert again.mark() == marks and again.fits(marks) is None
    again.metric(3, {"lr": 0.0})
    assert again.mark()["metrics"] == mark_of(run.jsonl("metrics").read_bytes()) and again.mark(2) == marks
    again.rewind({"stats": marks["stats"]}, 2)
    assert again.mark() == {"stats": marks["stats"]} and not run.jsonl("metrics").exists()


def test_rows_that_are_not_those_of_the_mark_are_named(run, sink):
    sink.metric(1, {"train_loss": 1.0})
    sink.metric(2, {"train_loss": 2.0})
    marks, path = sink.mark(), run.jsonl("metrics")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"2.0", b"2.5"))
    assert sink.fits(marks) == "the first 2 rows of metrics.jsonl are not those that were written before it"
    path.write_bytes(data[:-3])
    assert sink.fits(marks) == "metrics.jsonl has 1 row, 2 were written before it"
    path.unlink()
    assert sink.fits(marks) == "metrics.jsonl has 0 rows, 2 were written before it"
    assert sink.fits({"odd": marks["metrics"]}) == "a table 'odd' was written before it"


def test_a_table_without_rows_has_no_copy_of_earlier_ones(run, sink):
    run.parquet("stats").write_bytes(b"old")
    sink.write_parquet()
    assert not run.parquet("stats").exists()


def test_what_was_repaired_is_said_and_kept(run, sink, capsys):
    run.update_manifest(run_id="x", sweep="s", arm="a", seed=0, job="convergence", overrides=[])
    sink.repaired("this")
    sink.repaired("that")
    assert run.manifest()["repairs"] == ["this", "that"]
    assert capsys.readouterr().out == "warning: this\nwarning: that\n"


def test_a_failed_rewind_leaves_the_rows_as_they_were(run, sink, monkeypatch):
    sink.metric(1, {"train_loss": 1.0})
    marks = sink.mark()
    sink.metric(2, {"train_loss": 2.0})
    before = run.jsonl("metrics").read_bytes()
    monkeypatch.setattr(os, "truncate", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        sink.rewind(marks)
    assert run.jsonl("metrics").read_bytes() == before


def test_a_torn_tail_is_cut_before_the_next_row(run):
    run.jsonl("metrics").write_text('{"step": 1, "metric": "lr", "value": 1.0}\n{"step": 2, "met')
    RowSink(run, NullTracker()).metric(3, {"lr": 3.0})
    assert [row["step"] for row in run.rows("metrics")] == [1, 3]


def test_parquet_has_the_rows_with_fixed_types(run, sink):
    sink.metric(1, {"train_loss": math.nan, "val_loss": math.inf})
    sink.rows("stats", [stats_row(1)])
    sink.write_parquet()
    metrics, stats = (pd.read_parquet(run.parquet(name)) for name in ("metrics", "stats"))
    assert metrics["metric"].tolist() == ["train_loss", "val_loss"]
    assert math.isnan(metrics["value"][0]) and math.isinf(metrics["value"][1])
    assert (str(stats.dtypes["scale_min"]), str(stats.dtypes["step"])) == ("float64", "int64")
    assert not run.parquet("parity").exists()


def test_progress_is_written_now_and_then_and_at_the_end(run, sink, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    sink._opened_s = clock.now
    seen = []
    for step in range(10, 21):
        sink.progress(step, 20, 2.0, 500.0)
        seen.append(run.written_status()["progress"])
        clock.now += 0.2
    assert seen[0] == {"step": 10, "steps": 20, "part": 0.5, "loss": 2.0, "tokens_per_s": 500.0, "eta_s": None}
    assert [p["step"] for p in seen] == [10, 10, 10, 13, 13, 13, 16, 16, 16, 19, 20]
    assert seen[3]["eta_s"] == pytest.approx(0.2 * 7)  # 0.2 s a step since step 10, 7 to go
    assert seen[-1]["eta_s"] == 0
    assert run.written_status()["seconds"] == pytest.approx(2.0)


def test_a_fork_counts_the_steps_after_its_point(run, sink):
    sink.progress(400, 460, None, None, first=400)
    assert (said := run.written_status()["progress"])["part"] == 0.0 and said["first"] == 400
    sink.progress(460, 460, 2.0, None, first=400)
    assert run.written_status()["progress"]["part"] == 1.0


def test_where_steps_take_unequal_times_the_time_left_follows_the_part_that_is_done(run, sink, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    sink.phase("kernel")
    sink.progress(0, 3, None, None, part=0.0)
    clock.now += 6.0
    sink.progress(0, 3, None, None, part=0.2)
    status = run.written_status()
    assert status["phase"] == "kernel" and status["progress"]["part"] == 0.2
    assert status["progress"]["eta_s"] == pytest.approx(24.0)


def test_the_manifest_grows(run, sink):
    sink.manifest(device="cpu")
    sink.manifest(params=3)
    assert read_json(run.manifest_path) == {"device": "cpu", "params": 3}


def test_the_tracker_sees_metrics_after_the_file_has_them(run):
    seen = []

    class Spy(NullTracker):
        def log(self, step, values):
            seen.append((step, dict(values), len(run.rows("metrics"))))

    RowSink(run, Spy()).metric(1, {"lr": 1e-3})
    assert seen == [(1, {"lr": 1e-3}, 1)]


def test_a_writer_killed_at_random_loses_no_row_it_had_written(run):
    program = f"""
        from pathlib import Path
        from hqsweep.sweep.store.run_dir import RunDir
        from hqsweep.track.rows import RowSink
        from hqsweep.track.tracker import NullTracker
        sink = RowSink(RunDir(Path({str(run.path)!r})), NullTracker())
        for step in range(10**9):
            sink.metric(step, {{"train_loss": 1.0}})
            print(step, flush=True)
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "0\n"
    time.sleep(0.05)
    writer.send_signal(signal.SIGKILL)
    said = writer.communicate()[0].split("\n")
    last = int(said[-2] if len(said) > 1 else 0)
    steps = [row["step"] for row in run.rows("metrics")]
    assert steps == list(range(len(steps))) and len(steps) > last
