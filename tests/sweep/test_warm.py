"""Runs one after another in one worker have the rows of runs in a process of their own, in whatever order."""

import re
from types import SimpleNamespace

import pytest
from cases import LINEARS
from rich.console import Console

from hqsweep.config.job import parse
from hqsweep.sweep.console import PlainDisplay
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

NVFP4_SR = LINEARS["nvfp4"]
DELAYED = LINEARS["fp8_delayed"]
EXPERTS = {"input": "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8@rowwise_dequantized",
           "grad_output": "mxfp8"}  # fmt: skip
ARMS = {
    "sr": {"recipe": {"linear": NVFP4_SR}},
    "delayed": {"recipe": {"linear": DELAYED}, "dtype": "fp32"},
    "moe": {"recipe": {"linear": NVFP4_SR, "grouped_linear": EXPERTS}, "experts": 4},
    "schedule": {"recipe": {"linear": "bf16", "schedule": [{"at": 0.5, "linear": "mxfp8"}]}},
}


def make_runs(root, device="cpu", arms=ARMS, track="none"):
    points = []
    for name, arm in arms.items():
        config = parse({
            "job": "convergence", "sweep": "warm", "recipe": {"name": name} | arm["recipe"],
            "model": {"dim": 64, "layers": 2, "heads": 2, "experts": arm.get("experts", 0)},
            "data": {"source": "markov", "markov": {"length": 20_000}},
            "train": {"steps": 8, "batch": 2, "context": 32, "log_every": 1, "eval_every": 4, "eval_batches": 1,
                      "checkpoint_every": 5, "device": device, "dtype": arm.get("dtype", "bf16")},
            "stats": {"every": 4, "gemm": True}, "track": {"kind": track, "mode": "offline"},
        }).model_dump(mode="json")  # fmt: skip
        points.append(SimpleNamespace(config=config, arm=name, overrides=[]))
    return RunStore(root).create(sweep="warm", conf="warm", overrides=[], runs=points)


def finish(runs, *imports):
    statuses = run_local(runs, display=PlainDisplay(Console()), limits=Limits(threads=1, imports=imports))
    assert [status["state"] for status in statuses] == ["finished"] * len(runs), [run.log.read_text() for run in runs]
    return [status["pid"] for status in statuses]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bits_do_not_depend_on_the_runs_before_in_the_process(tmp_path, device):
    alone, forward, back = (make_runs(tmp_path / name, device) for name in ("alone", "forward", "back"))
    assert len({pid for run in alone for pid in finish([run])}) == len(alone)
    assert len(set(finish(forward))) == 1
    assert len(set(finish(back[::-1]))) == 1
    for runs in (forward, back):
        for run, other in zip(runs, alone, strict=True):
            for table in ("metrics", "stats"):
                assert run.jsonl(table).read_bytes() == other.jsonl(table).read_bytes() != b"", (run.name, table)
            assert _lines(run) == _lines(other)
            changing = {"started", "overrides", "commit", "dirty", "system"}
            manifests = [{k: v for k, v in each.manifest().items() if k not in changing} for each in (run, other)]
            assert manifests[0] == manifests[1]


def _lines(run):
    """What the log says, warnings included, without the paths and numbers that differ between processes."""
    return [re.sub(r"\S*/\S*|[\d,]+", "", line) for line in run.log.read_text().splitlines()]


def test_each_run_of_a_worker_has_its_own_run_of_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from support.track import wandb_file

    for name in ("API_KEY", "MODE", "BASE_URL", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    runs = make_runs(tmp_path, arms={name: ARMS[name] for name in ("sr", "delayed")}, track="wandb")
    assert len(set(finish(runs))) == 1
    for run in runs:
        (folder,) = (run.path / "wandb").glob("offline-run-*")
        mirror = wandb_file.load(folder)
        assert mirror.run.run_id.startswith(f"warm-{run.name}-") and mirror.exit_code == 0
        losses = [row["train_loss"] for row in mirror.history if "train_loss" in row]
        assert losses == [row["value"] for row in run.rows("metrics") if row["metric"] == "train_loss"]


@pytest.mark.usefixtures("forked_workers")
def test_a_users_factory_is_the_last_run_of_its_process(tmp_path):
    (tmp_path / "own_factory.py").write_text('def make(role):\n    return "mxfp8"\n')
    own = {"recipe": {"qfactory": "own_factory.make"}}
    runs = make_runs(tmp_path / "runs", arms={"first": ARMS["sr"], "own": own, "last": ARMS["delayed"]})
    first, with_own, last = finish(runs, "--import=own_factory.make", f"--import-from={tmp_path}")
    assert first == with_own != last
