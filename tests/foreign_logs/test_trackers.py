"""Folders of TensorBoard and W&B give the verdict of judge_whole_runs on the same numbers."""

import math

import pytest

from hqsweep.errors import UserError
from hqsweep.foreign_logs import trackers
from tests.foreign_logs.test_tables import is_right, judged


@pytest.fixture
def events(rows, here):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for (arm, seed), run in rows.groupby(["arm", "seed"]):
        with tensorboard.SummaryWriter(f"logs/{arm}/seed{seed}") as writer:
            for row in run.itertuples():
                writer.add_scalar("val_loss", row.val_loss, row.step)
                writer.add_scalar("lr", 0.1, row.step)
                writer.add_text("note", "of no interest")
    return rows.assign(val_loss=rows["val_loss"].astype("float32").astype(float))


def test_tensorboard(events):
    assert is_right(judged("logs"), events)


def test_tensorboard_of_a_resumed_run_has_the_later_values(events):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("logs/bf16/seed0", purge_step=150, filename_suffix=".z") as writer:
        writer.add_scalar("val_loss", 2.5, 200)
    later = events["arm"].eq("bf16") & events["seed"].eq(0) & events["step"].eq(200)
    events.loc[later, "val_loss"] = 2.5
    assert is_right(judged("logs"), events)


def test_a_damaged_file_of_events(here):
    pytest.importorskip("tensorboard")
    (here / "logs").mkdir()
    (here / "logs/events.out.tfevents.1.host").write_bytes(b"\x01" * 200)
    with pytest.raises(
        UserError, match="logs: no column 'val_loss', and no other one that is the metric; it has 'run', 'step'"
    ):
        judged("logs")
    with pytest.raises(UserError, match="is a file of one run; give the folder"):
        judged("logs/events.out.tfevents.1.host")


@pytest.fixture
def offline(rows, here, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fast = {"console": "off", "silent": True, "x_disable_stats": True, "disable_git": True, "x_disable_meta": True}
    rows = rows[rows["seed"] < 2]
    for (arm, seed), run in rows.groupby(["arm", "seed"]):
        started = wandb.init(
            mode="offline", dir=here, project="p", name=f"x-{arm}", settings=wandb.Settings(**fast),
            config={"recipe": arm, "seed": seed, "model": {"dim": 32}},
        )  # fmt: skip
        for row in run.itertuples():
            started.log({"val_loss": row.val_loss, "other": "text"}, step=row.step)
        started.finish()
    wandb.teardown()
    return rows


def test_offline_runs_of_wandb(offline, here):
    assert is_right(judged("wandb"), offline)
    torn = next(here.glob("wandb/*/*.wandb"))
    torn.write_bytes(torn.read_bytes()[:-400])
    assert judged("wandb").left_out or is_right(judged("wandb"), offline)


def test_values_that_wandb_writes_as_texts():
    curves: trackers.Curves = {}
    for step, value in enumerate(["NaN", "Infinity", "-Infinity", 1.5, True, "x"]):
        trackers._add_history({"_step": step, "loss": value}, curves)
    assert math.isnan(curves["loss"].pop(0)) and curves == {"loss": {1: math.inf, 2: -math.inf, 3: 1.5}}


def test_a_missing_package_says_how_to_get_it(here, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    (here / "a.wandb").touch()
    with pytest.raises(UserError, match=r"takes the package wandb; pip install 'hqsweep\[wandb\]'"):
        judged(here)
    (here / "a.tfevents").touch()
    with pytest.raises(UserError, match=r"pip install 'hqsweep\[tensorboard\]'"):
        judged(here)
