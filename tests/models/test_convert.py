"""convert and revert: the bytes of hqsweep.nn.Linear, and a model that is otherwise as it was."""

import copy
import pickle

import pytest
import torch
from cases import PRODUCTS, bare, crossed
from torch import nn

import hqsweep
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.models.linear import ConvertedLinear
from hqsweep.nn import Linear, autocast, quantization, set_recipe
from hqsweep.nn.core.module import quantized_modules
from hqsweep.recipe import Recipe

RECIPES = (
    *PRODUCTS, "mxfp8|bf16",
    {"input": "nvfp4|nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+sr|nvfp4+rht+sr"},
    {"input": "nvfp4|mxfp8@rowwise_dequantized", "weight": "mxfp8", "grad_output": "fp8_current+e5m2"},
)  # fmt: skip
"""One of each name, and hybrid ones, with a transform and random bits."""


class Net(nn.Module):
    """Tokens -> logits, with the head tied to the table."""

    def __init__(self, tied=True):
        super().__init__()
        self.table = nn.Embedding(48, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2))
        self.head = nn.Linear(64, 48, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


TOKENS = torch.arange(32).view(2, 16) % 48


def step(model, tokens=TOKENS):
    """Logits, and the gradient of each parameter."""
    model.zero_grad()
    with quantization(seed=3, step=5):
        logits = model(tokens)
        logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a, b):
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.feature("H37")
@pytest.mark.parametrize(
    ("recipe", "bias", "dtype"),
    crossed(RECIPES, [True, False], [torch.float32, torch.bfloat16], whole=[*RECIPES[-2:], "mxfp8"]),
    ids=str,
)
def test_bytes_are_those_of_our_linear(recipe, bias, dtype):
    torch.manual_seed(0)
    ours = Linear(64, 96, name="fc", recipe=bare(recipe), bias=bias, dtype=dtype).to(dtype)
    theirs = nn.Sequential()
    theirs.add_module("fc", nn.Linear(64, 96, bias=bias, dtype=dtype))
    ours.load_state_dict(theirs.fc.state_dict(), strict=False)
    hqsweep.convert(theirs, bare(recipe))
    results = []
    for module in (ours, theirs):
        x = draw("heavy", 32, 64).clamp(-9, 9).to(dtype).view(2, 16, 64).requires_grad_()
        for number in (1, 2):  # with a history
            with quantization(seed=1, step=number):
                y = module(x)
                y.backward(draw("normal", 32, 96, number).to(dtype).view(2, 16, 96))
        gradients = {name.removeprefix("fc."): p.grad for name, p in module.named_parameters()}
        results.append([y.detach(), x.grad, gradients["weight"], *([gradients["bias"]] if bias else [])])
    if recipe != {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]:
        assert all(map(torch.equal, *results))


@pytest.mark.feature("H37")
def test_keys_parameters_ties_hooks_and_classes_stay():
    model, seen = net(), []
    model.layers[0][0].register_forward_hook(lambda *_: seen.append("hook"))
    model.layers[1][2].weight.requires_grad_(False)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    keys, parameters = list(model.state_dict()), dict(model.named_parameters(remove_duplicate=False))
    bytes_before = {key: value.clone() for key, value in model.state_dict().items()}
    conversion = hqsweep.convert(model, "fp8_delayed", head=True)
    assert conversion.tied == [("table.weight", "head.weight")]
    assert len(conversion.modules) == 5 and not conversion.skipped
    assert isinstance(model.layers[0][0], nn.Linear) and type(model.head) is ConvertedLinear
    step(model)
    assert seen == ["hook"] and list(model.state_dict()) == keys
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == {
        n: id(p) for n, p in parameters.items()
    }
    assert model.layers[1][2].weight.grad is None
    assert hqsweep.revert(model) == 5 and hqsweep.revert(model) == 0
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(bytes_before[key], value) for key, value in model.state_dict().items())
    assert type(model.head) is nn.Linear and not quantized_modules(model)


def test_reverted_model_computes_as_before():
    model = net()
    before = step(model)
    with hqsweep.converted(model, "nvfp4"):
        assert not same(step(model), before)
    assert same(step(model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_identities_of_the_dtype_leave_every_bit(dtype):
    model = net().to(dtype)
    before = step(model)
    hqsweep.convert(model, {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype], head=True)
    assert same(step(model), before)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_with_parameters_of_their_own(make):
    model = net()
    hqsweep.convert(model, "mxfp8")
    other = make(model)
    assert same(step(model), step(other))
    with torch.no_grad():
        other.layers[0][0].weight.zero_()
    assert model.layers[0][0].weight.any()
    assert hqsweep.conversion_of(other).modules == hqsweep.conversion_of(model).modules
    assert hqsweep.conversion_of(other).parts[0].module is quantized_modules(other)[0]
    assert hqsweep.revert(other) == 4 and type(model.layers[0][0]) is ConvertedLinear


def test_loading_by_assignment_keeps_the_conversion():
    model, other = net(), net(tied=False)
    hqsweep.convert(model, "mxfp8")
    model.load_state_dict({k: v.clone() + 0.01 for k, v in other.state_dict().items()}, assign=True)
    assert type(model.layers[0][0]) is ConvertedLinear
    plain = net(tied=False)
    plain.load_state_dict(model.state_dict())
    hqsweep.convert(plain, "mxfp8")
    assert torch.equal(step(model)[0], step(plain)[0])


def test_set_recipe_autocast_and_another_convert_change_the_recipe():
    expected = {}
    for text in ("mxfp8", "nvfp4"):
        model = net()
        hqsweep.convert(model, f"format:{text}")
        expected[text] = step(model)
    model = net()
    hqsweep.convert(model, "mxfp8")
    with autocast(recipe=Recipe.from_config({"linear": "nvfp4"})):
        assert same(step(model), expected["nvfp4"])
    assert set_recipe(model, Recipe.from_config({"linear": "nvfp4"})) == 12
    assert same(step(model), expected["nvfp4"])
    conversion = hqsweep.convert(model, "mxfp8")
    assert same(step(model), expected["mxfp8"])
    assert {m.formats["weight"] for m in conversion.modules} == {"mxfp8"}


@pytest.mark.feature("H39")
def test_overrides_and_the_filter_are_both_followed():
    recipe = {"linear": "mxfp8", "head": "nvfp4", "overrides": [{"name": "layers.0.*", "linear": "nvfp4"}]}
    conversion = hqsweep.convert(net(), recipe, lambda module, name: not name.endswith(".2"), head=True)
    assert [(m.name, m.formats["input"]) for m in conversion.modules] == [
        ("layers.0.0", "nvfp4"),
        ("layers.1.0", "mxfp8"),
        ("head", "nvfp4"),
    ]
    assert [(s.name, s.why) for s in conversion.skipped] == [
        ("layers.0.2", "filter_fn said no"),
        ("layers.1.2", "filter_fn said no"),
    ]


def test_the_dtype_follows_the_weight():
    model = net()
    hqsweep.convert(model, "mxfp8")
    model.to(torch.bfloat16)
    assert model(TOKENS).dtype == torch.bfloat16
    fresh = net().to(torch.bfloat16)
    hqsweep.convert(fresh, "mxfp8")
    assert same(step(model), step(fresh))


@pytest.mark.feature("H40")
def test_what_is_never_called_is_unused():
    model = net()
    conversion = hqsweep.convert(model, "mxfp8", head=True)
    assert len(conversion.unused()) == 5
    model.layers[1](model.table(TOKENS))
    assert conversion.unused() == ["layers.0.0", "layers.0.2", "head"]
    conversion.reset()
    step(model)
    assert conversion.unused() == []


def test_states_of_delayed_scaling_go_by_the_conversion():
    first, second = net(), net()
    conversions = [hqsweep.convert(model, "fp8_delayed") for model in (first, second)]
    step(first)
    conversions[1].load_state_dict(conversions[0].state_dict())
    for model in (first, second):
        with quantization(seed=3, step=6):
            model.logits = model(TOKENS)
    assert torch.equal(first.logits, second.logits)
    with pytest.raises(UserError, match=r"layers\.7\.states.* belongs to no converted module"):
        conversions[1].load_state_dict({"layers.7.states.input_rowwise.amax": torch.ones(1, 1)})


def test_a_part_that_was_converted_before_keeps_its_name_and_takes_the_new_recipe():
    model = net()
    hqsweep.convert(model, "mxfp8", head=True)
    conversion = hqsweep.convert(model.layers[1], "format:nvfp4", lambda module, name: False)
    assert [(m.name, m.formats["weight"]) for m in conversion.modules] == [
        ("layers.1.0", "nvfp4"),
        ("layers.1.2", "nvfp4"),
    ]
    low = {"linear": "nvfp4", "overrides": [{"name": "layers.1.2", "linear": "mxfp8"}]}
    again = hqsweep.convert(model.layers[1], low)
    assert [m.formats["weight"] for m in again.modules] == ["nvfp4", "mxfp8"]
    whole = hqsweep.convert(model, "fp8_block")
    assert [m.name for m in whole.modules] == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2", "head"]
    assert {m.formats["weight"] for m in whole.modules if m.name != "head"} == {"fp8_block"}
    assert whole.modules[-1].formats["weight"] == "fp8_block" and hqsweep.revert(model) == 5


def test_what_was_done_is_a_table():
    conversion = hqsweep.convert(net(), "mxfp8")
    frame = conversion.frame()
    assert list(frame["name"]) == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2", "head"]
    assert list(frame["kind"]) == ["linear"] * 4 + ["skipped"] and frame["weight"][4] == ""
    assert str(conversion) == (
        "converted 4 linear, 88.9 % of the model's multiplications by weights; skipped head (the output projection;"
        " head=True takes it)"
    )
    assert "<table" in conversion._repr_html_() and "layers.1.2" in conversion._repr_html_()


def test_a_single_linear_is_a_model_and_a_meta_device_has_shapes():
    linear = nn.Linear(64, 96, device="meta")
    conversion = hqsweep.convert(linear, "mxfp8")
    assert [m.name for m in conversion.modules] == ["Linear"]
    assert linear(torch.empty(4, 8, 64, device="meta")).shape == (4, 8, 96)
