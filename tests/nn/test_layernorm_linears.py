"""An MLP as one autograd function is to the byte its two linears with an activation between them."""

import pytest
import torch
from cases import bare
from support.nn import emulated

from hqsweep.errors import UserError
from hqsweep.nn import (
    LayerNormMLP,
    Linear,
    MLPOptions,
    Probe,
    layernorm_linears,
    quantization,
    quantized_model_init,
    set_recipe,
)
from hqsweep.nn.layernorm_linears import ACTIVATIONS, activate, joined, joins
from hqsweep.ops.elementwise import INPUTS
from hqsweep.optim import use_main_grads
from hqsweep.quant import hybrid
from hqsweep.recipe import Recipe
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.sections import LinearQuantizers


@pytest.fixture
def calls(monkeypatch):
    """The kernels by torch's operators on the CPU; the list has the shapes that they were given."""
    shapes = []

    def forward(z, kind, amax, signs, end):
        assert (amax, signs, end) == (False, None, None)
        shapes.append(tuple(z.shape))
        return [ACTIVATIONS[kind](z.float()).bfloat16()]

    def backward(dh, z, kind, amax, signs, end):
        assert (amax, signs, end) == (False, None, None)
        assert dh.is_contiguous()
        assert dh.dtype == torch.bfloat16
        with torch.enable_grad():
            leaf = z.detach().float().requires_grad_()
            ACTIVATIONS[kind](leaf).backward(dh.float())
        return [leaf.grad.bfloat16()]

    monkeypatch.setattr(layernorm_linears, "activation", forward)
    monkeypatch.setattr(layernorm_linears, "activation_backward", backward)
    monkeypatch.setattr(layernorm_linears, "use_kernels", lambda x: True)
    return shapes


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_shapes_and_gradients_around_the_kernels(calls, kind):
    values = torch.randn(2, 3, 16 * INPUTS[kind]).bfloat16()
    gradient = torch.randn(2, 16, 3).transpose(1, 2)  # neither contiguous nor bfloat16
    z, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    h = activate(z, kind)
    h.backward(gradient.bfloat16())
    expected = ACTIVATIONS[kind](plain.float()).bfloat16()
    expected.backward(gradient.bfloat16())
    assert calls == [(6, 16 * INPUTS[kind])]
    assert torch.equal(h, expected)
    assert torch.equal(z.grad, plain.grad)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_what_the_kernels_do_not_take_is_torchs(calls, kind):
    for z in (torch.randn(3, 16), torch.randn(3, 12).bfloat16()):
        h = activate(z, kind)
        assert h.dtype == torch.float32
        assert torch.equal(h, ACTIVATIONS[kind](z.float()))
    assert calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_module_with_and_without_kernels(kind):
    """Once rounded to bfloat16, both read the same up to its last place."""
    torch.manual_seed(0)
    mlp = LayerNormMLP(64, 96, name="m", recipe="bf16", options=MLPOptions(activation=kind)).cuda()
    x, results = torch.randn(2, 40, 64, device="cuda"), []
    for kernels in (True, False):
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        with quantization(kernels=kernels):
            y = mlp(leaf)
        y.float().square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in mlp.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * other.abs().max().item())


DIM, FFN = 64, 128
RECIPES = {
    "blocks": "mxfp8",
    "exact columns": "fp8_block",
    "another source": "mxfp8|mxfp4@rowwise_dequantized",
    "an amax": "nvfp4",
    "transform and random bits": {"input": "nvfp4+rht", "weight": "nvfp4", "grad_output": "nvfp4+rht+sr"},
    "amaxes of rows": "nvfp4+row_scaled|fp8_current",
    "delayed": "fp8_delayed",
    "high precision": "bf16",
    "high precision in a direction": "mxfp8|bf16",
    "mixed": "nvfp4|mxfp8",
}
gpu = pytest.mark.gpu


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that run, emulated."""
    names = []
    emulated.install(monkeypatch, (layernorm_linears, layernorm_linears), hybrid, note=names.append)
    return names


def build(text, device="cpu", **options):
    torch.manual_seed(0)
    return LayerNormMLP(DIM, FFN, name="m", recipe=bare(text), options=MLPOptions(**options)).to(device)


def trained(mlp, *, join, monkeypatch, device="cpu", rows=128, steps=2):
    """y, and the gradients of x and of all parameters after steps of forward and backward."""
    if not join:
        monkeypatch.setattr("hqsweep.nn.layernorm_linears.joins", lambda *_: False)
    generator, results = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x = torch.randn(2, rows // 2, DIM, generator=generator).to(device).requires_grad_()
        mlp.zero_grad()
        with quantization(seed=3, step=step):
            y = mlp(x)
        y.backward(torch.randn(y.shape, generator=generator).to(device, y.dtype))
        results += [y.detach(), x.grad, *(p.main_grad.clone() if p.grad is None else p.grad for p in mlp.parameters())]
    return results


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.feature("T3")
@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("name", RECIPES)
def test_it_is_its_linears_to_the_byte(kernels, monkeypatch, name, kind):
    text = RECIPES[name]
    with monkeypatch.context() as patch:
        alone = trained(build(text, activation=kind), join=False, monkeypatch=patch)
    assert set(kernels) == {"activation", "activation_backward"}
    kernels.clear()
    with monkeypatch.context() as patch:
        assert equal(trained(build(text, activation=kind), join=True, monkeypatch=patch), alone)
    in_blocks = name in ("blocks", "exact columns", "another source")
    assert ("quantize_activated" in kernels) == in_blocks


def test_what_is_not_needed_is_not_made(kernels, monkeypatch):
    """Frozen weights, an input without a gradient, an evaluation."""
    norm = "fc1.norm.weight"
    frozen = [("fc1.weight",), ("fc2.weight",), ("fc1.weight", "fc2.weight"), ("fc1.weight", norm), (norm,)]
    for names in frozen:
        results = []
        for join in (False, True):
            mlp = build("mxfp8")
            for name in names:
                mlp.get_parameter(name).requires_grad_(False)
            x = torch.randn(32, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_(
                "fc1.norm.weight" not in names
            )
            with monkeypatch.context() as patch:
                if not join:
                    patch.setattr("hqsweep.nn.layernorm_linears.joins", lambda *_: False)
                y = mlp(x)
                y.float().square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in mlp.parameters())])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))
    kernels.clear()
    with torch.no_grad():
        mlp(x)
    assert kernels == ["quantize_activated"]


def test_held_weights_and_main_grads(kernels, monkeypatch):
    for held in (True, False):
        results = []
        for join in (True, False):
            with quantized_model_init(enabled=held):
                mlp = build("mxfp8")
            if not held:
                use_main_grads(mlp)
            with monkeypatch.context() as patch:
                results.append(trained(mlp, join=join, monkeypatch=patch))
        assert equal(*results)


def test_an_input_that_is_saved_as_it_is(kernels, monkeypatch):
    """save_original of fc1; that of fc2 asks for what is not made."""
    mlp = build("mxfp8")
    mlp.fc1.save_original_input = True
    with monkeypatch.context() as patch:
        whole = trained(mlp, join=True, monkeypatch=patch)
        assert equal(whole, trained(mlp, join=False, monkeypatch=patch))
    mlp.fc2.save_original_input = True
    assert not joins(mlp.fc1, mlp.fc2, "swiglu", torch.zeros(1))


def test_linears_that_are_more_than_their_products_run_by_themselves(kernels):
    x = torch.randn(32, DIM)
    role = QuantizerRole("linear", "input", "next")

    def joined_by(mlp):
        return joins(mlp.fc1, mlp.fc2, mlp.activation, x)

    assert joined_by(build("mxfp8"))
    assert not joined_by(LayerNormMLP(DIM, FFN, name="m", recipe="mxfp8", bias=True))
    assert not joined_by(LayerNormMLP(DIM, FFN, name="m", recipe="mxfp8", dtype=torch.float32))
    assert not joined_by(LayerNormMLP(DIM, 100, name="m", recipe="fp8_current"))
    hooked = build("mxfp8")
    hooked.fc2.register_forward_hook(lambda *_: None)
    assert not joined_by(hooked)
    bounded = build("mxfp8")
    bounded.fc1.grad_input_quantizer_role = role
    set_recipe(bounded, Recipe(linear=LinearQuantizers.parse("mxfp8", "recipe.linear")))
    assert not joined_by(bounded)
    with quantization(probe=Probe(0)):
        assert not joined_by(build("mxfp8"))


def test_linears_without_a_norm(kernels):
    """The shared expert of a mixture: fc1 is a linear."""
    fc1, fc2 = Linear(DIM, 2 * FFN, name="a", recipe="mxfp8"), Linear(FFN, DIM, name="b", recipe="mxfp8")
    x = torch.randn(32, DIM).bfloat16()
    y = joined(fc1, x, fc2, "swiglu")
    assert kernels == ["quantize_activated"]
    assert torch.equal(y, fc2(layernorm_linears.activate(fc1(x), "swiglu")))


def test_gradients_of_gradients_are_refused(kernels):
    x = torch.randn(32, DIM, requires_grad=True)
    with pytest.raises(UserError, match=r"m\.fc1: create_graph=True asks for gradients of gradients"):
        torch.autograd.grad(build("mxfp8")(x).sum(), x, create_graph=True)


@gpu
@pytest.mark.parametrize("rows", [256, 96])  # whole tiles, and others
@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("name", RECIPES)
def test_on_a_gpu(deterministic, monkeypatch, name, kind, rows):
    results = []
    for join in (False, True):
        with monkeypatch.context() as patch:
            mlp = build(RECIPES[name], "cuda", activation=kind)
            results.append(trained(mlp, join=join, monkeypatch=patch, device="cuda", rows=rows))
    assert equal(*results)
