"""hqsweep.convert(model, NAME) and its like compute by the operands of a run with recipe=NAME, to the byte."""

from types import SimpleNamespace

import pytest
import torch
from cases import FEW_PACKAGED
from support.models.tiny import equal, step, tiny
from torch import nn

import hqsweep
from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.jobs.parity.rank_cases import reading
from hqsweep.nn import Linear, autocast, quantization, quantized_model_init, set_recipe
from hqsweep.nn.core.module import quantized_modules
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.sweep.grid.compose import expand
from hqsweep.train.model import build_model
from hqsweep.train.user_model import convert_for_training

pytestmark = pytest.mark.slow

SECTION = SimpleNamespace(head=True, attention=None, quantized_weights=False)
TOKENS = torch.arange(64).view(2, 32) % 16
HELD = ["nvfp4", "float8_block_scaling", "nvfp4_row_scaled_fwd_mxfp8_bwd"]
SHORT = ["model.dim=64", "model.layers=2", "model.heads=2", "model.experts=2", "model.top_k=1"]


@pytest.fixture(scope="module")
def runs():
    """Name -> the config of a run with recipe=NAME."""
    names = sorted({*FEW_PACKAGED, *HELD, "mxfp6_e2m3"})
    grid = expand("convergence", [f"recipe={','.join(names)}", "model=moe", *SHORT])
    return {point.config["recipe"]["name"]: parse(point.config) for point in grid.points}


def computed(model, compute):
    """What a step computes, and the operands of all products of linears and experts."""
    with quantization(seed=3, step=5), reading() as reads:
        results = compute(model)
    operands = {}
    for number, read in enumerate(reads):
        where = (number, read.layer, read.tensor, read.direction, str(read.operand.format))
        operands |= {(*where, buffer): tensor for buffer, tensor in read.operand.buffers.items()}
    return results, operands


def assert_same(ours, theirs):
    assert equal(ours[0], theirs[0]) and ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(buffer, theirs[1][where]) for where, buffer in ours[1].items())


def gpt_step(model):
    model.zero_grad()
    logits = model(TOKENS)
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FEW_PACKAGED)
def test_a_converted_model_has_the_operands_of_a_run(name, runs):
    """Of experts, attention, linears and the head, whose weight is the embedding's."""
    ours, theirs = (tiny("mixtral", tie_word_embeddings=True) for _ in range(2))
    conversion = hqsweep.convert(ours, name, head=True)
    convert_for_training(theirs, runs[name].recipe.build(), SECTION, 0, torch.float32)
    assert [m.quantizers for m in quantized_modules(ours)] == [m.quantizers for m in quantized_modules(theirs)]
    assert {"experts", "linear"} <= {module.kind for module in conversion.modules}
    assert ("attention" in {module.kind for module in conversion.modules}) == name.endswith("_dpa")
    assert conversion.modules[-1].formats["weight"] == ("fp32" if name == "fp32" else "bf16")
    got = computed(ours, step)
    assert_same(got, computed(theirs, step))
    assert bool(got[1]) == (name != "fp32"), "in identities of its dtype the model's own forward runs"


@pytest.mark.parametrize("name", FEW_PACKAGED)
def test_the_gpt_of_a_run_takes_the_recipe_by_name(name, runs):
    expected = computed(build_model(runs[name], 16, runs[name].recipe.build()), gpt_step)
    model = build_model(runs["mxfp6_e2m3"], 16, runs["mxfp6_e2m3"].recipe.build())
    if name != "nvfp4_ends_bf16":  # which counts the layers of a whole model
        with autocast(recipe=name):
            assert_same(computed(model, gpt_step), expected)
    set_recipe(model, name)
    assert_same(computed(model, gpt_step), expected)


@pytest.mark.parametrize("name", HELD)
def test_weights_are_held_in_the_quantizers_of_a_run(name, runs):
    recipe, models = runs[name].recipe.build(), [tiny("mixtral") for _ in range(3)]
    for model, given, init in zip(models, (name, name, recipe), (None, name, None), strict=True):
        with quantized_model_init(recipe=init), quantization(seed=3):
            hqsweep.convert(model, given)
    held = [[p for p in model.parameters() if isinstance(p, HybridQuantizedTensor)] for model in models]
    assert len(held[0]) == len(held[1]) == len(held[2]) > 8
    for own in held[:2]:
        for ours, theirs in zip(own, held[2], strict=True):
            assert ours.quantizer == theirs.quantizer
            assert all(torch.equal(buffer, theirs.buffers[n]) for n, buffer in ours.buffers.items())
    assert equal(computed(models[0], step)[0], computed(models[2], step)[0])
    with quantized_model_init(recipe=name):
        linear = Linear(64, 96, name="layers.0.fc", recipe="bf16")
    assert linear.weight.quantizer == recipe.linear.weight


def test_overrides_and_schedules_of_an_own_recipe(tmp_path, monkeypatch):
    """A schedule is nobody's to follow but a training's, which is said; the rest is as in a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf/recipe").mkdir(parents=True)
    own = "defaults: [nvfp4, _self_]\nname: own\noverrides: [{layers: last(0.5), linear: mxfp8}]\n"
    (tmp_path / "conf/recipe/own.yaml").write_text(own)
    (tmp_path / "later.yaml").write_text("linear: mxfp8\nschedule: [{at: 0.5, fprop: bf16}]\n")
    conversion = hqsweep.convert(tiny("llama"), "own")
    weights = {module.name: module.formats["weight"] for module in conversion.modules}
    assert weights["model.layers.0.mlp.up_proj"] == "nvfp4+2d" and weights["model.layers.1.mlp.up_proj"] == "mxfp8"
    with pytest.warns(UserWarning, match=r"'later.yaml' has a schedule \(after 50 % of the updates\), which is not"):
        conversion = hqsweep.convert(nn.Linear(64, 64), "later.yaml")
    assert conversion.modules[0].formats["input"] == "mxfp8"
    with pytest.raises(UserError, match=r"convert: 'onw' is no recipe and no format .did you mean 'own'"):
        hqsweep.convert(tiny("llama"), "onw")
