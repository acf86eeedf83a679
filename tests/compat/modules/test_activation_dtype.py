"""Modules compute and return in the dtype of their activations, with gradients in the dtypes of what they are of."""

import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention, silu

import hqsweep.nn
from hqsweep import compat
from hqsweep.compat import CustomRecipe, IdentityQuantizer, autocast, high_precision_factory, quantized_model_init
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizer

D, F, H, SPLITS = 64, 96, 4, (12, 20)
LIMITS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Dtype of activations -> the relative error, in the norm, of what is computed in it."""
NO_DROPOUT = {"attention_dropout": 0.0}
Weights = dict[str, Tensor]


def normed(x: Tensor, w: Weights, of: str, rms: bool = False) -> Tensor:
    if rms:
        return rms_norm(x, x.shape[-1:], w[f"{of}norm.weight"], 1e-5)
    return layer_norm(x, x.shape[-1:], w[f"{of}norm.weight"], w[f"{of}norm.bias"])


def linear(x: Tensor, w: Weights, of: str = "") -> Tensor:
    return x @ w[f"{of}weight"].T + w[f"{of}bias"]


def mlp(x: Tensor, w: Weights, of: str = "", rms: bool = False) -> Tensor:
    h = linear(normed(x, w, f"{of}fc1.", rms), w, f"{of}fc1.")
    gate, up = h.chunk(2, -1) if rms else (h, 0)
    return linear(silu(gate) * up if rms else gelu(h, approximate="tanh"), w, f"{of}fc2.")


def attention(x: Tensor, w: Weights, of: str = "") -> Tensor:
    """Of x [tokens of two sequences in turns, D]."""
    qkv = linear(x, w, f"{of}qkv.").view(-1, 2, 3, H, D // H).permute(2, 1, 3, 0, 4)
    y = scaled_dot_product_attention(*qkv, is_causal=True)
    return linear(y.permute(2, 0, 1, 3).reshape(x.shape), w, f"{of}proj.")


def layer(x: Tensor, w: Weights) -> Tensor:
    y = x + attention(normed(x, w, "attn.qkv."), w, "attn.")
    return y + mlp(y, w, "mlp.")


def experts(x: Tensor, w: Weights, single: bool = False) -> Tensor:
    own = [(w["weight"][i], w["bias"][i]) if single else (w[f"weight{i}"], w[f"bias{i}"]) for i in range(2)]
    return torch.cat([part @ weight.T + bias for part, (weight, bias) in zip(x.split(SPLITS), own, strict=True)])


SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
KINDS = {
    "Linear": (lambda **o: compat.Linear(D, F, **o), linear),
    "LayerNormLinear": (lambda **o: compat.LayerNormLinear(D, F, **o), lambda x, w: linear(normed(x, w, ""), w)),
    "LayerNormMLP": (lambda **o: compat.LayerNormMLP(D, F, **o), mlp),
    "SwiGLU": (
        lambda **o: compat.LayerNormMLP(D, F, normalization="RMSNorm", activation="swiglu", **o),
        lambda x, w: mlp(x, w, rms=True),
    ),
    "GroupedLinear": (lambda **o: compat.GroupedLinear(2, D, F, **o), experts),
    "one tensor of experts": (
        lambda **o: compat.GroupedLinear(2, D, F, **SINGLE, **o), lambda x, w: experts(x, w, single=True)
    ),
    "MultiheadAttention": (lambda **o: compat.MultiheadAttention(D, H, **NO_DROPOUT, **o), attention),
    "with a norm": (
        lambda **o: compat.MultiheadAttention(D, H, input_layernorm=True, **NO_DROPOUT, **o),
        lambda x, w: attention(normed(x, w, "qkv."), w),
    ),
    "TransformerLayer": (lambda **o: compat.TransformerLayer(D, F, H, hidden_dropout=0.0, **NO_DROPOUT, **o), layer),
}  # fmt: skip
"""Kind -> how it is built, and what it computes of x [32, D] and its parameters."""


def built(kind: str, dtype: torch.dtype | None) -> nn.Module:
    torch.manual_seed(0)
    module = KINDS[kind][0](**({} if dtype is None else {"params_dtype": dtype}))
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return module


def called(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, hqsweep.nn.GroupedLinear):
        return module(x, list(SPLITS))
    return module(x) if x.dim() == 2 and hasattr(module, "weight") else module(x.view(-1, 2, D)).flatten(0, 1)


def passed(module: nn.Module, dtype: torch.dtype, context) -> dict[str, Tensor]:
    """x, dy, y, and the gradients of x and of the parameters by their names."""
    x = draw("normal", sum(SPLITS), D, 3).to(dtype).requires_grad_()
    with context:
        y = called(module, x)
    dy = draw("normal", *y.shape, 4).to(y.dtype)
    y.backward(dy)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad, **gradients}


def faults(kind: str, module: nn.Module, got: dict[str, Tensor], limit: float) -> list[str]:
    """What is farther from what float64 gives than a relative error of limit, or than its dtype rounds."""
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    x = got["x"].double().requires_grad_()
    y = KINDS[kind][1](x, weights)
    y.backward(got["dy"].double())
    exact = {"y": y.detach(), "dx": x.grad, **{name: w.grad for name, w in weights.items()}}
    found = []
    for name, value in exact.items():
        error = ((got[name].double() - value).norm() / value.norm()).item()
        if not error <= max(limit, torch.finfo(got[name].dtype).eps):
            found.append(f"{name}: {error:.1e}")
    return found


CONTEXTS = {
    "outside": (nullcontext, None),
    "autocast": (lambda: autocast(recipe=CustomRecipe(high_precision_factory)), None),
    "torch float16": (lambda: torch.autocast("cpu", torch.float16), torch.float16),
    "torch bfloat16": (lambda: torch.autocast("cpu", torch.bfloat16), torch.bfloat16),
}
"""A context, and the dtype of calls inside, where it is not that of their input."""


@pytest.mark.parametrize("params", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_in_their_dtypes_and_near_float64(kind, params):
    for dtype in LIMITS:
        for name, (context, inside) in CONTEXTS.items():
            module, calls = built(kind, params), inside or dtype
            got, where = passed(module, dtype, context()), (dtype, name)
            assert got["y"].dtype is calls and got["dx"].dtype is dtype, where
            assert {p.grad.dtype for p in module.parameters()} == {params}, where
            assert not (found := faults(kind, module, got, LIMITS[calls])), (*where, found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_identity_quantizer_rounds_to_the_dtype_that_it_names_and_to_none_without(kind):
    errors = []
    for chosen in (None, torch.float32, torch.float16, torch.bfloat16):
        module, recipe = built(kind, None), CustomRecipe(lambda role, chosen=chosen: IdentityQuantizer(dtype=chosen))
        got = passed(module, torch.float32, autocast(recipe=recipe))
        assert {t.dtype for t in got.values()} == {torch.float32}
        assert not faults(kind, module, got, LIMITS[chosen or torch.float32])
        errors.append(bool(faults(kind, module, got, LIMITS[torch.float32])))
    assert errors == [False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_formats_quantize_what_activations_have_and_leave_the_rest_in_their_dtype(kind):
    """MXFP8 forward from float32 or float16 values; backward, which is not quantized, is of those very operands."""
    recipe = "mxfp8_fwd_high_precision_bwd"
    for dtype in (torch.float32, torch.float16):
        module = built(kind, dtype)
        got = passed(module, dtype, autocast(recipe=recipe))
        assert {t.dtype for t in got.values()} == {dtype}
        assert faults(kind, module, got, LIMITS[dtype]) and not faults(kind, module, got, 0.2)


TEXTS = ("mxfp8", "nvfp4", "fp8_current", "bf16", "mxfp8|bf16@rowwise_dequantized")
OURS = {
    "Linear": lambda dtype: hqsweep.nn.Linear(D, F, bias=True, name="m", recipe="bf16", dtype=dtype),
    "GroupedLinear": lambda dtype: hqsweep.nn.GroupedLinear(
        2, D, F, name="m", recipe="bf16", dtype=dtype, options=hqsweep.nn.GroupedLinearOptions(bias=True)
    ),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_this_package_in_the_same_dtype(kind, text, dtype):
    """In bfloat16 with parameters in bfloat16 and in float32; in float32, "bf16" here is "fp32" there."""
    theirs = text.replace("bf16", "fp32") if dtype is torch.float32 else text
    for params in {dtype, torch.float32}:
        module, ours = built(kind, params), OURS[kind](dtype).to(params)
        ours.load_state_dict(module.state_dict())
        module.name, results = "m", []
        for own, recipe in ((module, text), (ours, theirs)):
            with hqsweep.nn.quantization(seed=1, step=1):
                results.append(passed(own, dtype, autocast(recipe=CustomRecipe(lambda role, recipe=recipe: recipe))))
        assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize("params", LIMITS)
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_held_weights_are_quantized_from_values_in_params_dtype_and_take_any_activations(kind, params):
    """Calls in other dtypes multiply the same bytes; where a call does not round the weight, these are its operands."""
    for dtype in LIMITS:
        modules = []
        for held in (True, False):
            with quantized_model_init(enabled=held, recipe="mxfp8"):
                modules.append(KINDS[kind][0](params_dtype=params, init_method=drawn))
        held, plain = modules
        values = plain.weights[0].detach()
        assert values.dtype is params and torch.equal(values, own_values(values))
        assert torch.equal(held.weights[0].dequantize().double(), quantized(values).double())
        got, expected = (passed(module, dtype, autocast(recipe="mxfp8")) for module in modules)
        assert got["y"].dtype is got["dx"].dtype is dtype
        if dtype in (params, torch.float32):
            assert torch.equal(got["y"], expected["y"]) and torch.equal(got["dx"], expected["dx"])


@pytest.mark.parametrize("build", [compat.Linear, partial(hqsweep.nn.Linear, name="linear", recipe="bf16")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_held_in_the_bfloat16_that_a_factory_names_come_back_from_a_file(build, dtype):
    recipe, file, outputs = CustomRecipe(lambda role: IdentityQuantizer(dtype=torch.bfloat16)), io.BytesIO(), []
    with quantized_model_init(recipe=recipe):
        module, fresh = build(D, F), build(D, F)
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file), assign=True)
    for own in (module, fresh):
        with autocast(recipe=recipe):
            outputs.append(own(draw("normal", 32, D).to(dtype)))
    assert torch.equal(*outputs)


def own_values(weight: Tensor) -> Tensor:
    return drawn(torch.empty_like(weight))


def drawn(weight: Tensor) -> Tensor:
    return weight.copy_(draw("normal", *weight.shape, 5).float() * 1.001)  # which bfloat16 has not


def quantized(weight: Tensor) -> Tensor:
    return HybridQuantizer.parse("mxfp8").quantize(weight).rowwise.dequantize()


def test_other_dtypes_are_refused():
    module = compat.Linear(D, F, name="m")
    with pytest.raises(UserError, match=r"m: the input is torch\.float64; it takes float32, float16 or bfloat16"):
        module(torch.zeros(1, D, dtype=torch.float64))
    with pytest.raises(UserError, match=r"m: the input is torch\.int64; it takes"):
        module(torch.zeros(1, D, dtype=torch.int64))
    with pytest.raises(UserError, match=r"Linear: params_dtype is torch\.float64; it takes"):
        compat.Linear(D, F, params_dtype=torch.float64)


DELAYED = compat.DelayedScaling(amax_history_len=2)
HELD = {
    "Linear": lambda dtype: compat.Linear(D, F, params_dtype=dtype),
    "GroupedLinear": lambda dtype: compat.GroupedLinear(2, D, F, params_dtype=dtype),
    "ops.Linear": lambda dtype: compat.ops.Linear(D, F, dtype=dtype),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_weight_in_another_dtype_keeps_its_states(kind):
    """So that it can be written before the first call."""
    with quantized_model_init(recipe=DELAYED):
        built = HELD[kind](torch.bfloat16)
    for module in (built, built.half()):
        weight = next(p for name, p in module.named_parameters() if "weight" in name)
        with torch.no_grad():
            weight.copy_(torch.full_like(weight, 3.0))
        assert torch.equal(weight.dequantize(), torch.full((F, D), 3.0, dtype=weight.dtype))


def test_a_weight_of_delayed_scaling_is_used_outside_of_autocast():
    """As it is held, and the next write ends a step."""
    with quantized_model_init(recipe=DELAYED):
        module = compat.Linear(D, F, bias=False)
    x = torch.ones(2, D, requires_grad=True)
    with torch.no_grad():
        module.weight.fill_(2.0)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, D), 2.0 * F))
    with torch.no_grad():
        module.weight.fill_(2.0**12)
    assert module.weight.dequantize().max() < 2.0**12  # by the scale of the step that ended
