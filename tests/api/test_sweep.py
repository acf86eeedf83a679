"""hqsweep.Sweep: what stands in the run folders, as typed tables that a caller cannot change."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from tests.report.conftest import STEPS, FakeRun, fork_study, three_arms, write_sweep


@pytest.fixture
def sweep(tmp_path: Path) -> hq.Sweep:
    write_sweep(tmp_path / "runs/study", three_arms())
    return hq.Sweep(tmp_path / "runs/study")


@pytest.mark.slow
def test_names_resolve_without_torch() -> None:
    code = "import sys, hqsweep as hq; hq.run, hq.Sweep, hq.compare, hq.Run\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert {"run", "Sweep", "compare"} <= set(dir(hq)) and not hasattr(hq, "swep")


def test_a_sweep_is_a_sequence_of_its_runs(sweep: hq.Sweep) -> None:
    assert isinstance(sweep, Sequence) and len(sweep) == 9 and len(list(sweep)) == 9
    name = sweep[3].name
    assert sweep[name] == sweep[f"study/{name}"] == sweep[3] == sweep["mxfp8-s0"] and sweep[7:] == list(sweep)[7:]
    assert [run.config["seed"] for run in sweep[:3]] == [0, 1, 2] and sweep[-1].manifest["arm"] == "nvfp4"
    assert (sweep[0].state, sweep[0].reason, sweep[0].log) == ("finished", None, "")
    assert list(sweep[0].metrics) == ["step", "metric", "value"] and len(sweep[0].stats) == len(sweep.stats) / 9
    assert (
        repr(sweep) == "<Sweep study: 9 runs, 9 finished>"
        and repr(sweep[0]) == f"<Run study/{sweep[0].name}: finished>"
    )


def test_runs_of_one_name_are_told_apart_by_their_sweeps(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_sweep(tmp_path / name, three_arms())
    both = hq.Sweep("one", "two", runs_dir=tmp_path)
    with pytest.raises(UserError, match=r"means 2 runs; name one of one/(\S+), two/\1$"):
        both[both[0].name]
    assert both[f"two/{both[0].name}"].path.parent.name == "two"


@pytest.mark.parametrize(("word", "says"), [("mxfp8-s9", "did you mean 'mxfp8-s"), ("nvfp4", "means 3 runs; name one")])
def test_a_name_that_is_not_one_run_is_a_sentence(sweep: hq.Sweep, word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        sweep[word]


@pytest.mark.parametrize("words", [(), ("nothing",)])
def test_a_sweep_of_nothing_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"Sweep: give the name|no run or sweep"):
        hq.Sweep(*words, runs_dir=tmp_path)


def test_runs_have_finals_and_the_keys_that_differ(sweep: hq.Sweep) -> None:
    runs = sweep.runs
    assert len(runs) == 9 and runs["seed"].dtype == "int64" and runs["val_loss"].dtype == "float64"
    assert {"recipe.name", "recipe.linear.input"} <= set(runs) and not {"train.lr", "seed.1", "point"} & set(runs)
    for row in runs.itertuples():
        last = sweep.metrics.query("run == @row.run and metric == 'val_loss'")["value"].iloc[-1]
        assert row.val_loss == last
    assert list(runs["arm"].unique()) == ["bf16", "mxfp8", "nvfp4"] and not runs["diverged"].any()


def test_forks_have_their_places(tmp_path: Path) -> None:
    write_sweep(tmp_path / "runs/forks", fork_study({"mxfp8": 0.001}, trunks=3))
    runs = hq.Sweep("forks", runs_dir=tmp_path / "runs").runs
    assert set(runs["design"]) == {"trunk", "fork"} and set(runs.loc[runs["design"] == "fork", "point"]) == {40, 80}


def test_metrics_are_every_row_and_typed(sweep: hq.Sweep) -> None:
    metrics = sweep.metrics
    assert list(metrics) == ["run", "arm", "seed", "step", "metric", "value"]
    assert len(metrics) == 9 * (2 * STEPS + STEPS // 20) and metrics["value"].dtype == "float64"
    assert sweep.stats["sqnr_db"].dtype == "float64" and sweep.checks.empty


def test_tables_that_were_given_out_can_be_changed(sweep: hq.Sweep) -> None:
    for name in ("runs", "metrics", "stats", "verdicts"):
        getattr(sweep, name).insert(0, "mine", 1)
        assert "mine" not in getattr(sweep, name)


def test_verdicts_are_those_of_the_command(sweep: hq.Sweep) -> None:
    verdicts = sweep.verdicts
    assert dict(zip(verdicts["arm"], verdicts["verdict"], strict=True)) == {
        "bf16": "baseline", "mxfp8": "equivalent", "nvfp4": "worse",
    }  # fmt: skip
    assert not (sweep[0].path.parents[1] / "noise.jsonl").exists()  # reading writes nothing
    pd.testing.assert_frame_equal(verdicts, sweep.compare().verdicts)
    assert sweep.compare("mxfp8").baseline == "mxfp8"


def test_what_is_damaged_is_left_out_and_said(sweep: hq.Sweep) -> None:
    (sweep[4].path / "metrics.jsonl").unlink()
    again = hq.Sweep(sweep[0].path.parent)
    assert len(again) == 9 and len(again.runs) == 8 and again.left_out[0].run == f"study/{sweep[4].name}"
    assert "8 finished, 1 damaged" in again._repr_html_() and "left out: study/mxfp8-s1" in again._repr_html_()


def test_a_notebook_gets_escaped_html(tmp_path: Path) -> None:
    write_sweep(
        tmp_path / "runs/x", [FakeRun(arm="<script>", recipe="bf16"), FakeRun(arm="b", recipe="c", fmt="mxfp8")]
    )
    page = hq.Sweep(tmp_path / "runs/x")._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "2 runs, 2 finished" in page
