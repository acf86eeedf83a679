"""hqsweep.track: rows are kept, runs are sealed, a crash is a failed run, and wrong use gets one sentence."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.jobs.command import ARM, ROWS, RUN_DIR, SEED, Follower
from hqsweep.nn.core.context import current
from hqsweep.sweep.store.run_dir import RunDir


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (ROWS, RUN_DIR, ARM, SEED, "RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def train(arm="bf16", seed=0, gap=0.0, **options):
    with hq.track("own", arm=arm, seed=seed, **options) as run:
        for step in (1, 2, 3):
            run.log(step, val_loss=3 - step / 10 + seed / 100 + gap, lr=0.1)
    return run


def seen(run) -> dict:
    return RunDir(run.path).seen()


def test_a_run_is_finished_sealed_and_compared():
    for seed in range(3):
        train("bf16", seed, 1e-4 * seed)
        run = train("slow", seed, 0.1)
    assert (
        seen(run)["state"] == "finished" and RunDir(run.path).sealed() and run.path.joinpath("metrics.parquet").exists()
    )
    sweep = hq.Sweep("runs/own")
    assert len(sweep.runs) == 6 and set(sweep.metrics["metric"]) == {"val_loss", "lr"}
    judgement = sweep.compare()
    assert dict(zip(judgement.verdicts["arm"], judgement.verdicts["verdict"], strict=True)) == {
        "bf16": "baseline", "slow": "worse",
    }  # fmt: skip
    assert judgement.verdicts["n"].tolist() == [0, 3]


def test_verdicts_are_those_of_the_same_numbers():
    values = {arm: [2.7 + seed / 100 + gap for seed in range(3)] for arm, gap in (("bf16", 0.0), ("slow", 0.1))}
    for arm, gap in (("bf16", 0.0), ("slow", 0.1)):
        for seed in range(3):
            with hq.track("own", arm=arm, seed=seed, judge={"margin": 0.01}) as run:
                run.log(3, val_loss=2.7 + seed / 100 + gap)
    expected = hq.judge(values, metric="val_loss", margin=0.01).verdicts
    assert hq.compare("own").verdicts.equals(expected)


def test_a_crash_marks_the_run_failed_and_keeps_its_rows():
    with pytest.raises(RuntimeError, match="boom"), hq.track("own", arm="a") as run:
        run.log(1, loss=float("nan"))
        raise RuntimeError("boom")
    assert (seen(run)["state"], seen(run)["reason"]) == ("failed", "RuntimeError: boom")
    assert "boom" in RunDir(run.path).log.read_text() and len(RunDir(run.path).rows("metrics")) == 1
    with pytest.raises(UserError, match="no run has finished"):
        hq.compare("own")


def test_an_interrupted_run_goes_on_and_drops_the_rows_from_its_step_on():
    with pytest.raises(KeyboardInterrupt), hq.track("own", arm="a") as run:
        for step in range(5):
            run.log(step, loss=9.0)
        raise KeyboardInterrupt
    assert seen(run)["state"] == "interrupted"
    with hq.track("own", arm="a") as again:
        again.log(3, loss=1.0)
    rows = RunDir(run.path).rows("metrics")
    assert again.path == run.path and [(row["step"], row["value"]) for row in rows] == [
        (0, 9.0), (1, 9.0), (2, 9.0), (3, 1.0),
    ]  # fmt: skip
    assert seen(run)["attempt"] == 2


def test_a_finished_run_is_repeated_only_when_asked():
    train()
    with pytest.raises(UserError, match="has finished; give force=True to repeat it"):
        train()
    run = train(force=True, gap=0.5)
    assert len(RunDir(run.path).rows("metrics")) == 6 and seen(run)["state"] == "finished"


def test_values_may_be_tensors_and_numpy():
    with hq.track("own", arm="a") as run:
        run.log(np.int64(1), {"loss": torch.tensor(2.5)}, acc=np.float32(0.5))
    assert {row["metric"]: row["value"] for row in RunDir(run.path).rows("metrics")} == {"loss": 2.5, "acc": 0.5}


def test_a_block_that_logs_nothing_is_a_failed_run():
    with pytest.raises(UserError, match="logged nothing"), hq.track("own", arm="a") as run:
        pass
    assert seen(run)["state"] == "failed"


def test_another_config_of_one_arm_and_seed_is_refused():
    train(config={"lr": 0.1})
    with pytest.raises(UserError, match=r"with another config \(lr 0.1 -> 0.2\)"):
        train(config={"lr": 0.2})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arm": ""}, "arm=''; it takes a name"),
        ({"arm": "a", "seed": -1}, "seed: got -1"),
        ({"arm": "a", "config": {"x": object()}}, "config has what JSON lacks"),
        ({"arm": "a", "mirror": "x"}, "track.kind: got 'x'"),
        ({"arm": "a", "judge": {"x": 1}}, "judge.x: no such key"),
    ],
)
def test_wrong_arguments(options, said):
    with pytest.raises(UserError, match=said):
        hq.track("own", **options)


@pytest.mark.parametrize(
    ("step", "values", "said"),
    [
        (-1, {"a": 1}, "step=-1"), (1.5, {"a": 1}, "step=1.5"), (True, {"a": 1}, "step=True"), (1, {}, "has no value"),
        (1, {"a": "2"}, "a is no number"), (1, {"a": torch.zeros(2)}, "a is no number"),
        (1, {"a": None}, "a is no number"),
    ],
)  # fmt: skip
def test_wrong_rows(step, values, said):
    with hq.track("own", arm="a") as run:
        run.log(1, loss=1.0)
        with pytest.raises(UserError, match=said):
            run.log(step, values)
    with pytest.raises(UserError, match="has ended"):
        run.log(2, loss=1.0)


def test_a_run_that_another_process_has_is_refused():
    code = (
        "import hqsweep as hq, time\nr = hq.track('own', arm='a')\nr.log(1, loss=1)\nprint('on', flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "on\n"
        with pytest.raises(UserError, match=f"process {other.pid}"):
            hq.track("own", arm="a")
        other.kill()
    assert hq.Sweep("runs/own").runs["state"].tolist() == ["interrupted"]


def test_steps_set_seed_and_step_for_modules():
    with hq.track("own", arm="a", seed=7) as run:
        contexts = []
        for step in run.steps(1, 4):
            contexts.append((current().seed, current().step))
            run.log(step, loss=1.0)
    assert contexts == [(7, 1), (7, 2), (7, 3)] and current().step is None


def test_ranks_above_0_log_nothing(monkeypatch, folder):
    monkeypatch.setenv("RANK", "1")
    with hq.track("own", arm="a") as run:
        run.log(1, loss=1.0)
    assert run.path is None and not (folder / "runs").exists()


def test_within_a_command_rows_go_to_its_run(monkeypatch, folder):
    for name, value in ((ROWS, "rows.jsonl"), (RUN_DIR, str(folder)), (ARM, "x"), (SEED, "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="seed=0, but hqsweep run started this process as seed 3"):
        hq.track("any", arm="y")
    with hq.track("any", arm="y", seed=3) as run:
        run.log(1, loss=float("inf"), acc=0.5)
    lines = []
    Follower(folder / "rows.jsonl", lines.append).end()
    assert lines[0] == '{"step": 1, "loss": "Infinity", "acc": 0.5}' and not os.path.exists("runs")


def test_the_mirror_in_wandb_is_offline():
    pytest.importorskip("wandb")
    run = train(mirror="wandb")
    assert [path.name for path in (run.path / "wandb").glob("offline-run-*/*.wandb")]
    assert seen(run)["state"] == "finished"


def test_a_sweep_of_another_kind_is_refused(folder):
    train()
    path = folder / "runs/own"
    from hqsweep.sweep.store import sweep_file

    facts = sweep_file.read(path)
    sweep_file.write(path, {key: value for key, value in (facts | {"conf": "quickstart"}).items() if key != "checksum"})
    with pytest.raises(UserError, match="is one of `hqsweep run conf=quickstart`; give another name"):
        train(seed=1)
