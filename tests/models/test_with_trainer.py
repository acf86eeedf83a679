"""Hugging Face's Trainer on a converted model: its loop, precision, accumulation, checkpoints."""

import pytest
import torch
from support.models.llamas import CONTEXT, VOCABULARY, differences, llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hqsweep
from hqsweep.nn import quantization

pytestmark = pytest.mark.slow

ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (16, CONTEXT))]


class Quantized(Trainer):
    """The trainer of docs/own_model.md: the random bits of a step are those of its number."""

    def training_step(self, *args, **options):
        with quantization(seed=self.args.seed, step=self.state.global_step + 1):
            return super().training_step(*args, **options)


def trained(recipe, folder, **options):
    """The losses of two steps and the trained model."""
    model = llama()
    if recipe:
        hqsweep.convert(model, recipe)
    fixed = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2, "seed": 1}
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    trainer = Quantized(model, TrainingArguments(str(folder), **fixed, **quiet, **options), train_dataset=ROWS)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["float32", "bf16 in microbatches, computed again"],
)
def test_it_trains_a_converted_model(options, tmp_path):
    """Also in bf16, for which it puts a forward of its own on the whole model: an identity recipe of the same dtype
    changes no bit there, and another one does."""
    identity = "bf16" if options else "fp32"
    (plain, _), (same, _), (losses, model) = (
        trained(recipe, tmp_path, **options) for recipe in (None, identity, "mxfp4")
    )
    assert len(plain) == 2 and plain == same
    assert losses != plain and all(0 < loss < 10 for loss in losses)
    assert not hqsweep.conversion_of(model).unused()


def test_what_it_saves_is_the_plain_model(tmp_path):
    _, model = trained("mxfp8", tmp_path)
    model.save_pretrained(tmp_path / "saved")
    again, loading = LlamaForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading.values())
    assert not differences(dict(model.state_dict()), dict(again.state_dict()))
    assert type(again.model.layers[0].mlp.up_proj) is torch.nn.Linear
