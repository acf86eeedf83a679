"""Models of transformers by a recipe: equal to the bit where the recipe says so, Conv1D, and meta devices."""

import time

import pytest
import torch
from cases import FEW, bare
from support.models.tiny import equal, step, tiny
from torch import nn

import hqsweep
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, Probe, quantization
from hqsweep.nn.core.module import quantized_modules

pytest.importorskip("transformers")


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_high_precision_is_the_original_to_the_bit(kind, recipe, dtype):
    model = tiny(kind, tie_word_embeddings=True).to(dtype)
    keys, before = list(model.state_dict()), step(model)
    conversion = hqsweep.convert(model, recipe, head=True)
    assert conversion.tied and not conversion.skipped and list(model.state_dict()) == keys
    assert conversion.modules[-1].name == "head"  # lm_head, by the recipe's section of that name
    assert equal(step(model), before) and not conversion.unused()
    with quantization(step=1, probe=Probe(step=1)):
        assert equal(step(model), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hqsweep.revert(model)
        plain = step(model)
        hqsweep.convert(model, "bf16", head=True)
        assert equal(step(model), plain)


def test_a_converted_model_trains_and_is_saved_as_a_plain_one(tmp_path):
    model = tiny("llama")
    hqsweep.convert(model, "mxfp8")
    before = step(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):
        step(model)
        optimizer.step()
    after = step(model)
    assert not equal(after, before)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not quantized_modules(loaded)
    hqsweep.convert(loaded.train(), "mxfp8")
    assert equal(step(loaded), after)


@pytest.mark.parametrize("recipe", FEW)
def test_conv1d_gives_the_bytes_of_our_linear_on_the_transposed_weight(recipe):
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("fc", Conv1D(96, 64))
    nn.init.normal_(model.fc.bias)
    ours = Linear(64, 96, name="fc", recipe=bare(recipe), bias=True, dtype=torch.float32)
    ours.load_state_dict({"weight": model.fc.weight.detach().t(), "bias": model.fc.bias.detach()})
    keys = list(model.state_dict())
    conversion = hqsweep.convert(model, bare(recipe))
    assert conversion.modules[0].kind == "conv1d" and conversion.modules[0].shape == (96, 64)
    results = []
    for module in (ours, model):
        x = draw("heavy", 32, 64).clamp(-9, 9).view(2, 16, 64).requires_grad_()
        with quantization(seed=1, step=4):
            y = module(x)
            y.backward(draw("normal", 32, 96, 1).view(2, 16, 96))
        results.append([y.detach(), x.grad])
    assert all(map(torch.equal, *results))
    assert torch.equal(model.fc.weight.grad.t(), ours.weight.grad) and torch.equal(model.fc.bias.grad, ours.bias.grad)
    assert list(model.state_dict()) == keys and hqsweep.revert(model) == 1 and type(model.fc) is Conv1D


def test_a_model_of_7_billion_parameters_on_the_meta_device_is_converted_at_once():
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    with torch.device("meta"):
        model = tiny("llama", **sizes, num_key_value_heads=32)
    recipe = {"linear": "nvfp4", "overrides": [{"layers": "last(4)", "linear": "bf16"}]}
    start = time.perf_counter()
    conversion = hqsweep.convert(model, recipe)
    assert time.perf_counter() - start < 2  # 0.2 s on a laptop core
    assert len(conversion.modules) == 7 * 32
    assert sum(m.formats["input"] == "bf16" for m in conversion.modules) == 7 * 4


def test_wrapped_models_draw_the_bits_of_plain_ones():
    results = []
    for wrap in (lambda model: model, torch.nn.DataParallel):
        model = tiny("llama")
        hqsweep.convert(wrap(model), "nvfp4+sr")
        with quantization(seed=2, step=3):
            results.append(step(model))
    assert equal(*results)


def test_hooks_of_accelerate_call_the_converted_forward():
    accelerate = pytest.importorskip("accelerate")
    model = tiny("llama")
    expected = tiny("llama")
    hqsweep.convert(expected, "mxfp8")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
    plain = step(model)
    conversion = hqsweep.convert(model, "mxfp8")
    assert equal(step(model), step(expected)) and not conversion.unused()
    hqsweep.revert(model)
    assert equal(step(model), plain)
