"""PEFT's LoRA on a converted model: the frozen base computes by the recipe, the adapters train as they are."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.models.llamas import differences, llama, loss_of, results

import hqsweep
from hqsweep.nn import quantization
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.core.probe import Probe

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def adapted(order, recipe="nvfp4+sr"):
    """A Llama with adapters that was converted before or after it got them."""
    model = llama()
    if order == "convert first":
        hqsweep.convert(model, recipe)
    torch.manual_seed(1)
    model = get_peft_model(model, LORA)
    if order == "adapters first":
        hqsweep.convert(model, recipe)
    return model


@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_the_base_is_converted_and_frozen_and_adapters_are_neither(order):
    """No product of a gradient is formed for a weight that takes none."""
    model = adapted(order)
    conversion = hqsweep.conversion_of(model)
    names = [module.name for module in conversion.modules]
    assert len(names) == 14 and "model.layers.0.self_attn.q_proj" in names
    assert not any("lora" in name for name in names)
    probe = Probe(step=1)
    with quantization(seed=1, step=1, probe=probe):
        outputs = results(model)
    assert {row["tensor"] for row in probe.rows} >= {"fprop", "dgrad"}
    assert not [row for row in probe.rows if row["tensor"] == "wgrad"]
    assert len(outputs) == 1 + 2 * 4 and all("lora_" in name for name in outputs if name != "loss")
    assert all(outputs[name].any() for name in outputs)


def test_the_order_changes_no_bit():
    runs = []
    for order in ("convert first", "adapters first"):
        with quantization(seed=1, step=1):
            runs.append(results(adapted(order)))
    assert not differences(*runs)


def test_adapters_that_are_skipped_are_told():
    model = adapted("adapters first")
    skipped = {each.name: each.why for each in hqsweep.conversion_of(model).skipped}
    name = next(name for name in skipped if "layers.0.self_attn.q_proj" in name and "lora_A" in name)
    assert "adapter" in skipped[name] and skipped["lm_head"]


def losses_of(model, cached):
    """Losses of steps before, between and after merging and unmerging; PEFT writes past the count of versions."""
    losses = []
    for step, change in enumerate((lambda: None, model.merge_adapter, model.unmerge_adapter), 1):
        change()
        with torch.no_grad(), quantization(step=step, cache_weights=cached):
            losses += [float(loss_of(model)) for _ in range(2)]
    return losses


def test_a_merge_is_seen_by_operands_of_weights_that_are_kept():
    """They are made of the merged weight, and again of the first one after unmerging."""
    model = adapted("adapters first", "mxfp8")
    losses = losses_of(model, cached=True)
    assert losses == losses_of(adapted("adapters first", "mxfp8"), cached=False) and losses[0] != losses[2]
    merged = model.merge_and_unload()
    assert len(quantized_modules(merged)) == 14 and abs(float(loss_of(merged)) - losses[2]) < 1e-4
    assert hqsweep.revert(merged) == 14
    assert type(merged.model.layers[0].self_attn.q_proj) is torch.nn.Linear
