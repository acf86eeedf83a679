"""Callbacks of trainers: rows go to the run, and each step has the run's seed and the step's number."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hqsweep as hq
from hqsweep.nn.core.context import current
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.callbacks import kept


def test_clocks_are_no_rows():
    logs = {"loss": 2.0, "train_runtime": 3.0, "eval_samples_per_second": 1.0, "epoch": 0.5, "note": "x", "flag": True}
    assert kept(logs) == {"loss": 2.0}


class Seen(torch.nn.Module):
    """A linear that notes the context of each call in training."""

    def __init__(self):
        super().__init__()
        self.linear, self.contexts = torch.nn.Linear(4, 1), []

    def forward(self, x, labels=None):
        if self.training:
            self.contexts.append((current().seed, current().step))
        loss = (self.linear(x).squeeze(-1) - (0 if labels is None else labels)).square().mean()
        return {"loss": loss}


def test_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(16)]
    options = transformers.TrainingArguments(
        "out", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = Seen()
    with hq.track("own", arm="a", seed=5) as run:
        callbacks = [run.transformers_callback()]
        transformers.Trainer(model, options, train_dataset=data, callbacks=callbacks).train()
    assert model.contexts == [(5, step) for step in (1, 1, 2, 2, 3, 3, 4, 4)] and current().step is None
    rows = RunDir(run.path).rows("metrics")
    assert {row["step"] for row in rows if row["metric"] == "loss"} == {2, 4}
    assert not any("runtime" in row["metric"] for row in rows)


def test_lightning(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Seen()

        def training_step(self, batch, index):
            loss = self.model(batch[0])["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    with hq.track("own", arm="a", seed=5) as run:
        trainer = lightning.Trainer(
            max_steps=3, callbacks=[run.lightning_callback()], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2))
    assert module.model.contexts == [(5, 1), (5, 2), (5, 3)]
    assert [row["step"] for row in RunDir(run.path).rows("metrics") if row["metric"] == "loss"] == [1, 2, 3]
