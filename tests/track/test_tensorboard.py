"""The TensorBoard mirror, read back by TensorBoard's own loader."""

import json
import math
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from hqsweep.config.jobs import TABLES
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.track.open import mirror_report, open_tracker, sync
from hqsweep.track.tensorboard import (
    TEXT_ROWS,
    WIDTH,
    forest_text,
    leaves,
    log_report,
    markdown_table,
    open_tensorboard,
    tensorboard_folder,
)

pytest.importorskip("tensorboard")


CONFIG = {
    "job": "convergence", "sweep": "grid", "seed": 3, "recipe": {"name": "mxfp8"},
    "deep": {"er": [1, 2.5, None], "none": None, "flag": True},
    "track": {"kind": "tensorboard", "mode": "auto", "project": "hqsweep", "entity": None, "init_timeout_s": 2},
}  # fmt: skip
ROW = dict.fromkeys(TABLES["stats"]) | {"layer": "l.0", "tensor": "input", "direction": "rowwise", "sqnr_db": 30.5}


@pytest.fixture
def run(tmp_path):
    point = SimpleNamespace(config=CONFIG, arm="mxfp8 lr=0.1", overrides=[])
    return RunStore(tmp_path / "runs").create(sweep="grid", conf="c", overrides=[], runs=[point])[0]


def load(run) -> EventAccumulator:
    return EventAccumulator(str(tensorboard_folder(run)), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(loaded: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in loaded.Scalars(tag)]


def text(loaded: EventAccumulator, tag: str) -> str:
    (event,) = loaded.Tensors(f"{tag}/text_summary")
    return event.tensor_proto.string_val[0].decode()


def hyperparameters(loaded: EventAccumulator) -> dict[str, HParamsPluginData]:
    contents = loaded.PluginTagToContent("hparams")
    return {tag: HParamsPluginData.FromString(content) for tag, content in contents.items()}


def test_metrics_statistics_config_and_tables_are_there(run):
    tracker = open_tensorboard(run, CONFIG)
    tracker.rewind(-1)
    for step in (0, 10, 20):
        tracker.sampled(step, [ROW])
        tracker.log(step, {"train_loss": 3.0 - step})
    tracker.log(20, {"val_loss": math.nan})
    tracker.table("stats", [ROW])
    tracker.table("parity", [{"check": "kernel", "case": "a|b"}, {"check": "routing", "case": None}])
    tracker.table("calibrate", [])
    assert tracker.finish(0)
    loaded = load(run)
    assert points(loaded, "train_loss") == [(0, 3.0), (10, -7.0), (20, -17.0)]
    assert points(loaded, "sqnr_db/l.0/input/rowwise") == [(0, 30.5), (10, 30.5), (20, 30.5)]
    assert math.isnan(points(loaded, "val_loss")[0][1])
    assert "er:\n  - 1\n  - 2.5" in text(loaded, "config") and "kind: tensorboard" in text(loaded, "config")
    assert text(loaded, "parity") == "| check | case |\n| --- | --- |\n| kernel | a\\|b |\n| routing |  |"
    assert sorted(loaded.Tags()["tensors"]) == ["config/text_summary", "parity/text_summary"]
    parameters = hyperparameters(loaded)
    named = parameters["_hparams_/session_start_info"].session_start_info.hparams
    assert (named["seed"].number_value, named["deep.flag"].string_value) == (3, "true")
    assert "deep.none" not in named and parameters["_hparams_/session_end_info"].session_end_info.status == 1


def test_a_run_that_failed_has_no_successful_end(run):
    tracker = open_tensorboard(run, CONFIG)
    tracker.rewind(-1)
    tracker.finish(3)
    assert "_hparams_/session_end_info" not in hyperparameters(load(run))


def test_a_resumed_run_has_no_point_twice(run):
    first = open_tensorboard(run, CONFIG)
    first.rewind(-1)
    for step in range(1, 8):
        first.log(step, {"train_loss": float(step)})
        first.sampled(step, [ROW])
    first._close()  # as a killed one leaves it
    second = open_tensorboard(run, CONFIG)
    second.rewind(4)
    for step in range(5, 10):
        second.log(step, {"train_loss": float(step)})
        second.sampled(step, [ROW])
    assert second.finish(0)
    loaded = load(run)
    assert points(loaded, "train_loss") == [(step, float(step)) for step in range(1, 10)]
    assert [step for step, _ in points(loaded, "sqnr_db/l.0/input/rowwise")] == list(range(1, 10))
    assert text(loaded, "config")  # once


def test_an_attempt_from_the_start_replaces_what_was_there(run):
    for value in (1.0, 2.0):
        tracker = open_tensorboard(run, CONFIG)
        tracker.rewind(-1)
        tracker.log(1, {"train_loss": value})
        tracker.finish(0)
    assert points(load(run), "train_loss") == [(1, 2.0)] and text(load(run), "config")
    assert len(list(tensorboard_folder(run).iterdir())) == 1


@pytest.mark.slow
def test_a_killed_run_loses_about_a_second(run):
    program = f"""
        import time
        from pathlib import Path
        from hqsweep.sweep.store.run_dir import RunDir
        from hqsweep.track.tensorboard import open_tensorboard
        run = RunDir(Path({str(run.path)!r}))
        tracker = open_tensorboard(run, run.config())
        tracker.rewind(-1)
        for step in range(1000):
            tracker.log(step, {{"loss": 1.0}})
            print(step, flush=True)
            time.sleep(0.1)
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    while worker.stdout.readline() != "35\n":
        pass
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert len(points(load(run), "loss")) >= 15
    tracker = open_tensorboard(run, CONFIG)
    tracker.rewind(9)
    tracker.log(10, {"loss": 2.0})
    tracker.finish(0)
    assert points(load(run), "loss") == [*((step, 1.0) for step in range(10)), (10, 2.0)]


def test_training_does_not_wait_and_errors_are_one_line_each(run, capsys):
    run.path.joinpath("tensorboard").write_text("a file is in the way")
    began = time.monotonic()
    tracker = open_tracker(run)
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
    assert time.monotonic() - began < 1
    assert not tracker.finish(0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in lines] == [["tensorboard", " log"], ["tensorboard", " finish"]]
    assert all(line.endswith("the run goes on, its rows are in its folder") for line in lines)


def test_sync_makes_the_mirror_again(run):
    rows = [{"step": step, "metric": "train_loss", "value": 1.0} for step in (10, 20)]
    run.jsonl("metrics").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.jsonl("stats").write_text("".join(json.dumps(ROW | {"step": step}) + "\n" for step in (10, 15)))
    run.write_status(state="finished", exit_code=0)
    for _ in range(2):  # a second time changes nothing
        assert sync(run, "auto") == [tensorboard_folder(run)]
        loaded = load(run)
        assert points(loaded, "train_loss") == [(10, 1.0), (20, 1.0)]
        assert points(loaded, "sqnr_db/l.0/input/rowwise") == [(10, 30.5), (15, 30.5)]
        assert "_hparams_/session_end_info" in hyperparameters(loaded)
    shutil.rmtree(tensorboard_folder(run))
    assert RunDir(run.path).rows("metrics") == rows


def test_leaves_and_long_tables():
    assert dict(leaves({"a": {"b": [1, None]}, "c": None, "d": True})) == {"a.b": "[1, null]", "d": "true"}
    table = markdown_table([{"n": n} for n in range(TEXT_ROWS + 3)])
    assert table.count("\n|") == TEXT_ROWS + 1 and table.endswith("\n\nand 3 more rows, which are in the run's folder")


def test_cells_of_others_end_no_row_and_begin_no_html():
    table = markdown_table([{"arm": "a|b\n\n# c <img src=x>\x1b[2J &lt;"}])
    assert table.split("\n")[2:] == ["| a\\|b # c &lt;img src=x>\\x1b[2J &amp;lt; |"]


def arm(name, verdict, gap, low, high):
    known = {"arm": name, "verdict": verdict, "gap": gap, "ci_low": low, "ci_high": high, "margin": 0.25}
    return known | {"within_margin": None, "n": 4, "sentence": f"{name}: {verdict}.", "other": 1}


ARMS = [
    arm("nvfp4 lr=0.1", "worse", 1.25, 1.0, 1.5),
    arm("mxfp8", "equivalent", 0.0625, 0.0, 0.125),
    arm("mxfp4", "undecided", None, None, None),
]


@pytest.fixture
def judged_run(tmp_path):
    run = RunDir(tmp_path / "runs" / "grid" / "a")
    run.path.mkdir(parents=True)
    (run.path / "config.yaml").write_text(
        yaml.safe_dump({"job": "parity", "seed": 0, "track": {"kind": "tensorboard"}})
    )
    return run


def test_verdicts_forest_and_gaps_replace_those_of_before(judged_run, tmp_path):
    for arms in (ARMS[:1], ARMS):
        assert mirror_report([judged_run], tmp_path / "reports" / "grid", arms)
    loaded = EventAccumulator(str(judged_run.sweep_path / "tensorboard" / "grid")).Reload()
    texts = {tag: loaded.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in loaded.Tags()["tensors"]}
    header, _, first, *_ = texts["verdicts/text_summary"].split("\n")
    assert header == "| arm | verdict | gap | ci_low | ci_high | margin | within_margin | n | sentence |"
    assert first == "| nvfp4 lr=0.1 | worse | 1.25 | 1.0 | 1.5 | 0.25 |  | 4 | nvfp4 lr=0.1: worse. |"
    assert texts["forest/text_summary"] == f"```text\n{forest_text(ARMS)}\n```"
    gaps = {tag: [event.value for event in loaded.Scalars(tag)] for tag in loaded.Tags()["scalars"]}
    assert gaps == {
        "gap_pct/nvfp4 lr=0.1": [1.25], "gap_pct_low/nvfp4 lr=0.1": [1.0], "gap_pct_high/nvfp4 lr=0.1": [1.5],
        "gap_pct/mxfp8": [0.0625], "gap_pct_low/mxfp8": [0.0], "gap_pct_high/mxfp8": [0.125],
    }  # fmt: skip
    assert len(list((judged_run.sweep_path / "tensorboard" / "grid").iterdir())) == 1


def test_the_forest_is_drawn_to_scale():
    axis, first, second = forest_text(ARMS).split("\n")
    assert axis.split() == ["-0.25", "%", "+1.5", "%"]
    place = {name: line.index(line[14:]) for name, line in (("mxfp8", first), ("nvfp4", second))}
    assert set(place.values()) == {14} and first.startswith("mxfp8 ") and second.startswith("nvfp4 lr=0.1 ")
    bars = [line[14 : 14 + WIDTH] for line in (first, second)]
    per_pct = (WIDTH - 1) / 1.75
    assert [bar.index("o") for bar in bars] == [round(0.3125 * per_pct), round(1.5 * per_pct)]
    assert [bar.index("|") for bar in bars] == [round(0.25 * per_pct)] * 2 and bars[1].count(":") == 2
    assert (bars[1].index("-"), bars[1].rindex("-")) == (round(1.25 * per_pct), WIDTH - 1)
    assert first.endswith("  equivalent") and second.endswith("  worse")
    assert forest_text(ARMS[2:]) == "no arm has a gap"


def test_what_cannot_be_written_is_one_line(judged_run, tmp_path, capsys):
    (judged_run.sweep_path / "tensorboard").write_text("in the way")
    assert not log_report(judged_run.sweep_path, tmp_path / "report", ARMS)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("tensorboard: report: ") and line.endswith("report")


@pytest.mark.parametrize("kind", ["none", "tensorboard"])
def test_nothing_is_kept_where_nothing_tracks(judged_run, tmp_path, kind, monkeypatch):
    (judged_run.path / "config.yaml").write_text(yaml.safe_dump({"job": "parity", "seed": 0, "track": {"kind": kind}}))
    monkeypatch.setattr("hqsweep.track.open.find_spec", lambda name: None)
    assert not mirror_report([judged_run], tmp_path / "report", ARMS)
    assert not (judged_run.sweep_path / "tensorboard").exists()


def test_a_name_of_others_is_text_in_the_forest():
    line = forest_text([arm("a```\n# b\x1b[2J", "worse", 1.0, 0.5, 1.5)]).split("\n")[1]
    assert line.startswith("a'''\\n# b\\x1b[2J  ")
