"""The mirror made again from the rows, read back without a server."""

import json
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("wandb")

from support.track import wandb_file

from hqsweep.config.jobs import TABLES
from hqsweep.errors import UserError
from hqsweep.sweep.store.store import RunStore
from hqsweep.track.open import sync
from hqsweep.track.wandb import known_id_of, open_run

CONFIG = {
    "job": "convergence", "sweep": "grid", "seed": 3, "recipe": {"name": "mxfp8"},
    "track": {"kind": "none", "mode": "auto", "project": "hqsweep", "entity": None, "init_timeout_s": 2},
}  # fmt: skip
ROWS = [(10, "train_loss", 3.0), (10, "lr", 0.1), (20, "train_loss", 2.5), (20, "lr", 0.05), (20, "val_loss", math.inf)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("API_KEY", "MODE", "BASE_URL", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(f"WANDB_{name}")
    monkeypatch.setenv("HOME", str(tmp_path))
    point = SimpleNamespace(config=CONFIG, arm="mxfp8", overrides=[])
    run = RunStore(tmp_path / "runs").create(sweep="grid", conf="c", overrides=[], runs=[point])[0]
    rows = [{"step": step, "metric": metric, "value": value} for step, metric, value in ROWS]
    run.jsonl("metrics").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 30, "met')
    row = dict.fromkeys(TABLES["stats"]) | {"layer": "a", "tensor": "input", "direction": "rowwise", "sqnr_db": 30.5}
    run.jsonl("stats").write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in (10, 15)))
    run.write_status(state="failed", exit_code=3)
    return run


def test_sync_replays_every_row_whatever_the_mirror_had(run):
    partial = open_run(run, CONFIG)
    partial.log(10, {"train_loss": 3.0})
    partial.finish(1)
    run_id = known_id_of(run)
    for _ in range(2):  # a second time changes nothing
        (folder,) = sync(run, "offline")
        uploaded = wandb_file.load(folder)
        names = {metric for _, metric, _ in ROWS}
        rows = [(row["_step"], name, row[name]) for row in uploaded.history for name in names & row.keys()]
        assert sorted(rows) == sorted(ROWS)
        curve = [row["_step"] for row in uploaded.history if row.get("sqnr_db/a/input/rowwise") == 30.5]
        assert curve == [10, 15]
        assert any("stats.path" in row for row in uploaded.history)
        assert (uploaded.run.run_id, uploaded.run.run_group, uploaded.exit_code) == (run_id, "grid", 3)
        assert folder.is_relative_to(run.path)


def test_sync_keeps_the_id_under_which_an_earlier_version_had_the_run(run):
    (run.path / "wandb" / f"offline-run-20260101_010101-grid-{run.name}").mkdir(parents=True)
    (folder,) = sync(run, "offline")
    assert wandb_file.load(folder).run.run_id == f"grid-{run.name}"


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_sync_deletes_nothing_behind_a_link(run, tmp_path, kind):
    kept = tmp_path / "elsewhere" / f"offline-run-20260101_010101-grid-{run.name}"
    kept.mkdir(parents=True)
    run.write_status(state="interrupted")
    run.config_path.write_text(run.config_path.read_text().replace("kind: none", f"kind: {kind}"))
    (run.path / kind).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link, and what is behind it is not deleted"):
        sync(run, "offline")
    assert kept.is_dir()


def test_a_run_at_work_is_left_alone(run):
    with run.lock(), pytest.raises(UserError, match="it is at work; sync it when it has ended"):
        sync(run, "offline")
