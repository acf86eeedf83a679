"""convert inside quantized_model_init: weights held as operands, in training and files as plain ones would be."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from cases import bare
from safetensors.torch import load_file
from support.models import tiny
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import hqsweep
from hqsweep.errors import UserError
from hqsweep.models.held import held_parts
from hqsweep.nn import autocast, quantization, quantized_model_init, set_recipe
from hqsweep.optim import FusedAdam
from hqsweep.parallel.shared.held import link_held
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor
from hqsweep.recipe import Recipe
from tests.models.test_convert import TOKENS, net, same, step

RECIPES = (
    "mxfp8", "nvfp4|mxfp8@rowwise_dequantized", "fp8_current", "fp8_delayed|mxfp8", "nvfp4+2d|fp8_block+2d",
    {"input": "bf16", "weight": "mxfp8|bf16", "grad_output": "nvfp4+sr"},
)  # fmt: skip


def hold(model, recipe, **options):
    with quantized_model_init(preserve_high_precision_init_val=True), quantization(seed=3):
        return hqsweep.convert(model, recipe, **options)


def names_of(conversion):
    return {weight.name: weight.why for weight in conversion.plain}


def train(model, dtype=None, steps=(1, 2, 3)):
    """Losses, and the value of each weight that training would go on from."""
    optimizer, losses = FusedAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
    for number in steps:
        with quantization(seed=3, step=number):
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                loss = model(TOKENS).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: optimizer.master_param(p) for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.feature("H9")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_training_is_that_of_plain_weights(recipe, dtype):
    plain, held = net(tied=False), net(tied=False)
    hqsweep.convert(plain, bare(recipe), head=True)
    conversion = hold(held, {"linear": recipe, "head": recipe}, head=True, dtype=dtype)
    assert len(list(held_parts(held))) == len(conversion.modules) == 5 and not conversion.plain
    losses, values = train(plain, dtype)
    own_losses, masters = train(held, dtype)
    assert own_losses == losses and all(torch.equal(masters[name], value) for name, value in values.items())


def test_the_dtype_is_that_of_autocast_at_conversion_and_is_the_products():
    model = net()
    with torch.autocast("cpu", torch.bfloat16):
        hold(model, "mxfp8")
    assert model.layers[0][0].weight.source_dtype is torch.bfloat16
    assert model.layers[0][0].weight.dtype is torch.float32
    with pytest.raises(
        UserError, match=r"layers\.0\.0: its weight is held quantized from values in torch\.bfloat16, but"
    ):
        model(TOKENS)
    with pytest.raises(UserError, match=r"convert: dtype is that of .* weights that are held.*or leave dtype out"):
        hqsweep.convert(net(), "mxfp8", dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"convert: dtype is torch\.float64; it takes torch\.float32"):
        hold(net(), "mxfp8", dtype=torch.float64)


def test_another_quantizer_is_refused_at_the_call():
    model = net()
    hold(model, "mxfp8")
    for recipe in ("nvfp4", "fp32"):  # an identity, too, which would run the plain forward
        set_recipe(model, f"format:{recipe}")
        with pytest.raises(UserError, match=rf"layers\.0\.0: the weight is held in mxfp8, but .* asks for {recipe}"):
            model(TOKENS)
    set_recipe(model, "mxfp8")
    with autocast(recipe=Recipe.from_config({"linear": "nvfp4"})), pytest.raises(UserError, match="is held in mxfp8"):
        model(TOKENS)
    model(TOKENS)


@pytest.mark.feature("H9")
@pytest.mark.parametrize("kept", [True, False])
def test_revert_gives_initial_values_or_those_of_the_operands(kept):
    model, before = net(), net()
    hold(model, "mxfp8")
    if not kept:
        for _, _, weight in held_parts(model):
            weight.clear_high_precision_init_val()
    model.layers[0][0].weight.requires_grad_(False)
    decoded = model.layers[0][0].weight.dequantize()
    assert hqsweep.revert(model) == 4 and type(model.layers[0][0]) is nn.Linear
    weight = model.layers[0][0].weight
    assert type(weight) is nn.Parameter and not weight.requires_grad
    assert torch.equal(weight, before.layers[0][0].weight if kept else decoded)
    assert torch.equal(decoded, before.layers[0][0].weight) is False
    weight.requires_grad_(True)
    assert same(step(model), step(before)) is kept


class Shared(nn.Module):
    """Linears that share a weight, which in one case something else reads, too."""

    def __init__(self, reader=None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight
        if reader == "table":
            self.table = nn.Module()
            self.table.weight = self.a.weight
        if reader == "view":
            self.view = nn.Parameter(self.a.weight.detach().view(-1))

    def forward(self, x):
        return self.b(self.a(x).relu())


@pytest.mark.feature("H9")
def test_ties_of_linears_stay_and_weights_that_others_read_stay_plain():
    model, plain = Shared(), Shared()
    conversion = hold(model, "mxfp8")
    hqsweep.convert(plain, "mxfp8")
    assert model.a.weight is model.b.weight and conversion.tied == [("a.weight", "b.weight")] and not conversion.plain
    x, results = torch.randn(32, 32), []
    for each in (model, plain):
        optimizer = FusedAdam(each.parameters(), lr=1e-2)
        for _ in range(3):
            y = each(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(y)
    assert torch.equal(*results)
    assert hqsweep.revert(model) == 2 and model.a.weight is model.b.weight and type(model.a.weight) is nn.Parameter
    other = {"linear": "mxfp8", "overrides": [{"name": "b", "linear": "nvfp4"}]}
    for reader, recipe, why in (
        ("table", "mxfp8", "it is read as table.weight, too"),
        ("view", "mxfp8", "it is read as view, too"),
        (None, other, "it is tied to that of b, whose format is nvfp4"),
        (None, "fp8_delayed", "it is tied, and delayed scaling has a history for each module"),
    ):
        model = Shared(reader)
        whys = names_of(hold(model, recipe))
        assert whys.keys() == {"a", "b"} and whys["a"] == why and type(model.a.weight) is nn.Parameter


@pytest.mark.feature("H9")
def test_weights_that_stay_plain_have_a_reason():
    model = net()
    weight_norm(model.layers[0][0])
    recipe = {"linear": "mxfp8", "overrides": [{"name": "layers.1.0", "linear": "bf16"}]}
    conversion = hold(model, recipe | {"head": "mxfp8"}, head=True)
    assert names_of(conversion) == {
        "layers.0.0": "it is computed at each use, and no parameter",
        "layers.1.0": "its format is bf16, which is not quantized",
        "head": "it is read as table.weight, too",
    }
    assert str(conversion).endswith("plain weights of layers.0.0 (it is computed at each use, and no parameter);"
                                    " layers.1.0 (its format is bf16, which is not quantized);"
                                    " head (it is read as table.weight, too)")  # fmt: skip
    assert [part.name for _, part, _ in held_parts(model)] == ["layers.0.2", "layers.1.2"]
    again = hold(model, recipe)  # what is held already stays
    assert names_of(again).keys() == names_of(conversion).keys() and len(list(held_parts(model))) == 2
    conversion = hold(nn.Linear(64, 64, device="meta"), "fp8_delayed")
    assert names_of(conversion) == {"Linear": "it is on the meta device, where delayed scaling has no history"}


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_frozen_weights_are_those_of_plain_ones(recipe):
    plain, held = net(tied=False), net(tied=False)
    for model in (plain, held):
        model.layers[0][0].weight.requires_grad_(False)
    hqsweep.convert(plain, recipe)
    names = names_of(hold(held, recipe))
    assert names.keys() == ({"layers.0.0"} if recipe == "fp8_delayed" else set())
    assert all(why.startswith("it is frozen, and delayed scaling takes another scale") for why in names.values())
    assert train(held)[0] == train(plain)[0]


def test_a_model_on_the_meta_device_is_allocated_and_written_later():
    model, expected = nn.Linear(64, 96, device="meta"), nn.Linear(64, 96)
    hold(model, "mxfp8")
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    hqsweep.convert(expected, "mxfp8")
    x = torch.randn(32, 64)
    assert isinstance(model.weight, HybridQuantizedTensor) and torch.equal(model(x), expected(x))


def _by_state_dict(model):
    other = net(tied=False)
    hold(other, "nvfp4|fp8_delayed").load_state_dict(hqsweep.conversion_of(model).state_dict())
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.feature("H9")
@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _by_state_dict])
def test_copies_train_on_as_the_model(make):
    model = net(tied=False)
    hold(model, "nvfp4|fp8_delayed")
    train(model)
    other = make(model)
    assert len(list(held_parts(other))) == 4
    results = [train(each, steps=(4, 5)) for each in (model, other)]
    assert results[0][0] == results[1][0]


def test_weights_are_linked_to_the_states_of_their_modules():
    """As what loads a checkpoint or begins a fork does, before any forward."""
    model = net()
    hold(model, "nvfp4|fp8_delayed")
    for _, _, weight in held_parts(model):
        weight.states = None
    link_held(model)
    for _, part, weight in held_parts(model):
        assert weight.states.states["columnwise"] is part.states["weight_columnwise"]


@pytest.mark.feature("H9")
@pytest.mark.parametrize("recompute", [True, False])
def test_checkpoints_and_compiled_blocks_change_no_bit(recompute):
    plain, held = net(), net()
    hqsweep.convert(plain, "nvfp4")
    hold(held, "nvfp4")
    layer = held.layers[0]
    if recompute:
        forward = layer.forward
        layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    else:
        layer.compile(backend="aot_eager")
    assert same(step(held), step(plain))


@pytest.mark.feature("H9")
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss"])
def test_hugging_face_models(kind, tmp_path):
    """Stacked experts are one parameter, held as GroupedTensor; those that lie as [E, K, N] stay plain. What is saved
    are the values of the operands, by the plain names."""
    plain, model = tiny.tiny(kind), tiny.tiny(kind)
    hqsweep.convert(plain, "mxfp8")
    conversion = hold(model, "mxfp8")
    assert tiny.equal(tiny.step(plain), tiny.step(model))
    held = {name: p for name, p in model.named_parameters() if isinstance(p, HybridQuantizedTensor)}
    stacked = {name for name, p in held.items() if isinstance(p, GroupedTensor)}
    assert len(stacked) == (4 if kind == "mixtral" else 0)
    assert set(names_of(conversion).values()) == ({"it lies as [E, K, N]"} if kind == "gpt_oss" else set())
    hqsweep.save_model(model, tmp_path / "out")
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(values[name], p.dequantize()) for name, p in held.items() if name in values)
    again = tiny.tiny(kind)
    hold(again, "mxfp8")
    hqsweep.load_checkpoint(tmp_path / "out", again)
    ours, theirs = again.state_dict(), model.state_dict()
    assert all(torch.equal(theirs[n], v) for n, v in ours.items() if not isinstance(v, HybridQuantizedTensor))
    assert hqsweep.revert(model) and all(map(torch.equal, model.parameters(), tiny.tiny(kind).parameters()))


def test_a_tie_is_saved_once(tmp_path):
    model = Shared()
    hold(model, "mxfp8")
    hqsweep.save_model(model, tmp_path / "out.safetensors")
    values = load_file(tmp_path / "out.safetensors")
    assert values.keys() == {"a.weight", "a.bias", "b.bias"}
    assert torch.equal(values["a.weight"], model.a.weight.dequantize())
