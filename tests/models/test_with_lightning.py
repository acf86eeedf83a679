"""Lightning's Trainer on a converted model, in float32 and in bf16-mixed."""

import logging
import warnings

import pytest
import torch
from support.models.llamas import differences, llama, loss_of, tokens

import hqsweep
from hqsweep.nn import quantization

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """Keeps the loss of every step."""

    def __init__(self, recipe):
        super().__init__()
        self.model, self.losses = llama(), []
        if recipe:
            hqsweep.convert(self.model, recipe)

    def training_step(self, batch, index):
        with quantization(seed=1, step=self.global_step + 1):
            loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(recipe, precision, folder):
    module = Module(recipe)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", precision=precision, default_root_dir=folder, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders without workers
        trainer.fit(module, torch.utils.data.DataLoader([tokens(step)[0] for step in range(4)], batch_size=2))
    return trainer, module


@pytest.mark.parametrize(("precision", "identity"), [("32-true", "fp32"), ("bf16-mixed", "bf16")])
def test_it_trains_a_converted_model(precision, identity, tmp_path):
    """An identity recipe of the same dtype changes no bit, and another one does."""
    (_, plain), (_, same), (_, other) = (trained(recipe, precision, tmp_path) for recipe in (None, identity, "mxfp4"))
    assert len(plain.losses) == 2 and plain.losses == same.losses != other.losses
    assert not hqsweep.conversion_of(other.model).unused()


def test_its_checkpoint_is_that_of_the_plain_model(tmp_path):
    trainer, module = trained("mxfp8", "32-true", tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    plain = Module(None)
    plain.load_state_dict(saved)
    assert not differences(dict(module.state_dict()), dict(plain.state_dict()))
    assert loss_of(plain.model) != loss_of(module.model)
