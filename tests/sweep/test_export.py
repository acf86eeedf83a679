"""The exported weights of a run are those that it trained, whatever its linears hold."""

from pathlib import Path

import pytest
import torch
import yaml

from hqsweep.checkpoints.load import load_checkpoint
from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.errors import Damaged, UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.sweep.export import export_run
from hqsweep.sweep.run_dir import RunDir
from hqsweep.train import data
from hqsweep.train.loop import Trainer, build_model


def config(*, fork: dict | None = None, steps: int = 3, **model) -> ConvergenceConfig:
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1,
            "recipe": {"name": "r", "linear": dict.fromkeys(("input", "weight", "grad_output"), "fp8_delayed")},
            "model": {"dim": 32, "layers": 1, "heads": 2, **model},
            "data": {"source": "markov", "markov": {"length": 20000}}, "stats": {"every": 0},
            "train": {"steps": steps, "batch": 2, "context": 16, "eval_batches": 1, "device": "cpu", "lr": 1e-2},
            **({"fork": fork} if fork else {}),
        }
    )  # fmt: skip


def trained(cfg: ConvergenceConfig, folder: Path) -> RunDir:
    """A run that was trained to its end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    convergence.run(cfg, ListSink(), folder)
    return RunDir(folder)


KINDS = {
    "plain": {}, "tied": {"tied": True}, "held": {"quantized_weights": True}, "experts": {"experts": 2, "top_k": 1},
    "held experts": {"experts": 2, "top_k": 1, "quantized_weights": True},
}  # fmt: skip


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_the_weights_are_those_that_were_trained(model: dict, tmp_path: Path) -> None:
    cfg = config(**model)
    file, step = export_run(trained(cfg, tmp_path / "t/run"), tmp_path / "out")
    assert (file, step) == (tmp_path / "out/model.safetensors", 3)
    trainer = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))
    for _ in trainer.steps():
        pass
    masters = {name: trainer.optimizer.master_param(p) for name, p in trainer.model.named_parameters()}
    plain = build_model(config(**(model | {"quantized_weights": False})), 16, cfg.recipe.build())
    load_checkpoint(file, plain)
    assert all(torch.equal(p, masters[name]) for name, p in plain.named_parameters())


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    run = trained(config(fork={"at": [1, 2], "steps": 1, "decay": 1, "warmup": 0}, steps=2), tmp_path / "t/run")
    assert export_run(run, tmp_path / "one.safetensors", 1) == (tmp_path / "one.safetensors", 1)
    with pytest.raises(UserError, match="it has no checkpoint of step 7; it has those of 1, 2"):
        export_run(run, tmp_path / "out", 7)
    path = run.checkpoint / "step_2.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"step_2\.pt: it has \d+ bytes, and \d+ were written, so it is not exported"):
        export_run(run, tmp_path / "out")
    for file in run.checkpoint.iterdir():
        file.unlink()
    with pytest.raises(UserError, match="it has kept no checkpoint, so there is nothing to export"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fork_keeps_no_state(tmp_path: Path) -> None:
    cfg = config(fork={"at": [1], "steps": 1, "decay": 1, "warmup": 0, "trunk": "the_trunk"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    with pytest.raises(UserError, match="a fork keeps no state of its end; its trunk the_trunk has that of its"):
        export_run(RunDir(tmp_path / "run"), tmp_path / "out")
