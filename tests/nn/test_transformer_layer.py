"""LayerNormLinear, LayerNormMLP, MultiheadAttention and TransformerLayer: against torch in float64, and their roles.

That each of their GEMMs gets the operands of the recipe is held bit for bit here against single linears, and by the
parity job's check `modules`.
"""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.nn import (
    AttentionOptions,
    LayerNormLinear,
    LayerNormLinearOptions,
    LayerNormMLP,
    Linear,
    MLPOptions,
    MultiheadAttention,
    TransformerLayer,
    TransformerOptions,
    autocast,
    set_recipe,
)
from hqsweep.nn.core.module import quantized_modules
from hqsweep.nn.layernorm_linears import ACTIVATIONS
from hqsweep.nn.norm_embedding import EPSILON
from hqsweep.recipe import Recipe

FP32 = Recipe.from_config({"linear": "fp32", "dpa": "fp32"})
MXFP8 = Recipe.from_config({"linear": "mxfp8"})
MXFP8_DPA = Recipe.from_config({"linear": "mxfp8", "dpa": "fp8_current"})
B, T, D, H = 2, 32, 64, 2


def norm(x, module):
    weight = module.norm.weight.double()
    if module.norm.bias is None:
        return F.rms_norm(x, (D,), weight, EPSILON)
    return F.layer_norm(x, (D,), weight, module.norm.bias.double(), EPSILON)


def linear(x, module):
    return F.linear(x, module.weight.double(), None if module.bias is None else module.bias.double())


def layernorm_linear(x, module):
    return linear(norm(x, module), module)


def mlp(x, module, activation):
    hidden = layernorm_linear(x, module.fc1)
    if activation == "gelu":
        return linear(F.gelu(hidden, approximate="tanh"), module.fc2)
    gate, up = hidden.chunk(2, -1)
    return linear(F.silu(gate) * up, module.fc2)


def attention(x, module):
    q, k, v = layernorm_linear(x, module.qkv).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(o.transpose(1, 2).reshape(B, T, D), module.proj)


def layer(x, module, activation):
    x = x + attention(x, module.attn)
    return x + mlp(x, module.mlp, activation)


def assert_like(module, reference):
    """y, dx and the gradient of every parameter, in float32 against float64."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    x = torch.randn(B, T, D, generator=generator).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y = module(x)
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    actual = [y, x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    expected = reference(x64, module)
    expected.backward(dy.double())
    for a, b in zip(actual, [expected, x64.grad, *(p.grad for p in module.parameters())], strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


SHARED = {"recipe": FP32, "dtype": torch.float32}
OPTIONS = [
    {"bias": bias, "normalization": n} for bias, n in ((False, "RMSNorm"), (True, "RMSNorm"), (True, "LayerNorm"))
]


@pytest.mark.feature("F65")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layernorm_linear(options):
    bias, options = options["bias"], LayerNormLinearOptions(normalization=options["normalization"])
    assert_like(LayerNormLinear(D, 96, name="l", **SHARED, bias=bias, options=options), layernorm_linear)


@pytest.mark.feature("F66")
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layernorm_mlp(options, activation):
    bias, options = options["bias"], MLPOptions(normalization=options["normalization"], activation=activation)
    module = LayerNormMLP(D, 96, name="m", **SHARED, bias=bias, options=options)
    assert_like(module, lambda x, m: mlp(x, m, activation))


@pytest.mark.feature("F68")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_multihead_attention(options):
    bias, options = options["bias"], AttentionOptions(normalization=options["normalization"])
    assert_like(MultiheadAttention(D, H, name="a", **SHARED, bias=bias, options=options), attention)


@pytest.mark.feature("F68")
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transformer_layer(options, activation):
    options = TransformerOptions(activation=activation, **options)
    module = TransformerLayer(D, 96, H, name="t", **SHARED, options=options)
    assert_like(module, lambda x, m: layer(x, m, activation))


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="m: activation is 'relu'; allowed: gelu, swiglu"):
        LayerNormMLP(D, 96, name="m", recipe=FP32, options=MLPOptions(activation="relu"))


def test_every_linear_and_the_attention_have_roles_of_their_own():
    modules = quantized_modules(TransformerLayer(D, 96, H, name="t", recipe=MXFP8))
    assert [(m.module_type, m.name) for m in modules] == [
        ("linear", "t.attn.qkv"), ("norm", "t.attn.qkv.norm"), ("dpa", "t.attn.dpa"), ("linear", "t.attn.proj"),
        ("linear", "t.mlp.fc1"), ("norm", "t.mlp.fc1.norm"), ("linear", "t.mlp.fc2"),
    ]  # fmt: skip
    roles = LayerNormMLP(D, 96, name="m", recipe=MXFP8).get_quantizer_roles(fwd=True)
    assert list(map(str, roles)) == [
        "m.fc1/linear/input", "m.fc1/linear/weight", "None", "m.fc2/linear/input", "m.fc2/linear/weight", "None"
    ]  # fmt: skip


def boundaries(module):
    names = {"qkv output": module.qkv.output_quantizer_role, "dpa output": module.dpa.output_quantizer_role}
    names |= {"proj grad": module.proj.grad_input_quantizer_role, "dpa grad": module.dpa.grad_input_quantizer_role}
    return {name: role and str(role) for name, role in names.items()}


WIRED = {
    "qkv output": "a.dpa/dpa/qkv", "dpa output": "a.proj/linear/input",
    "proj grad": "a.dpa/dpa/do", "dpa grad": "a.qkv/linear/grad_output",
}  # fmt: skip


@pytest.mark.feature("F8")
def test_attention_wires_the_four_boundaries_inside_it_and_unwires_them_for_high_precision():
    x = torch.randn(B, T, D)
    module = MultiheadAttention(D, H, name="a", recipe=MXFP8_DPA, options=AttentionOptions(quantize_boundaries=True))
    assert set(boundaries(module).values()) == {None}
    first = module(x)
    assert boundaries(module) == WIRED
    assert str(module.qkv.quantizers.output) == "fp8_current" and str(module.dpa.quantizers.output) == "mxfp8"
    with autocast(recipe=MXFP8):
        module(x)
    assert boundaries(module) == WIRED | {"qkv output": None, "proj grad": None}
    with autocast(recipe=FP32):
        module(x)
    assert set(boundaries(module).values()) == {None}
    assert torch.equal(module(x), first)
    set_recipe(module, FP32)
    module(x)
    assert set(boundaries(module).values()) == {None}


@pytest.mark.feature("F62", "T23")
def test_a_boundary_is_rounded_once_by_its_writer():
    """Power-of-two scales: rounding again changes nothing, so wiring the boundaries of MX operands does not either."""
    x, mx = torch.randn(B, T, D), Recipe.from_config({"linear": "mxfp8"})
    torch.manual_seed(0)
    plain = MultiheadAttention(D, H, name="a", recipe=mx)
    wired = MultiheadAttention(D, H, name="a", recipe=mx, options=AttentionOptions(quantize_boundaries=True))
    wired.load_state_dict(plain.state_dict())
    assert torch.equal(plain(x), wired(x)) and str(wired.dpa.quantizers.output) == "mxfp8"


@pytest.mark.feature("F8")
def test_queries_and_keys_that_turn_are_not_rounded_before():
    options = AttentionOptions(quantize_boundaries=True, rope_base=1e4)
    module = MultiheadAttention(D, H, name="a", recipe=MXFP8_DPA, options=options)
    module(torch.randn(B, T, D))
    assert boundaries(module) == WIRED | {"qkv output": None, "dpa grad": None}


MIXED = {"input": "nvfp4|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}


def single(module, name):
    """A Linear of the name with a linear's parameters, under the recipe."""
    own = Linear(*reversed(module.weight.shape), name=name, recipe=MIXED, bias=module.bias is not None)
    own.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("norm")})
    return own


def by_hand(module, name):
    """What the module computes, of single linears."""
    if isinstance(module, LayerNormLinear):
        alone = single(module, name)
        return lambda x: alone(module.norm(x))
    if isinstance(module, LayerNormMLP):
        fc1, fc2 = by_hand(module.fc1, f"{name}.fc1"), single(module.fc2, f"{name}.fc2")
        return lambda x: fc2(ACTIVATIONS[module.activation](fc1(x).float()))
    if isinstance(module, MultiheadAttention):
        qkv, proj = by_hand(module.qkv, f"{name}.qkv"), single(module.proj, f"{name}.proj")
        return lambda x: proj(module._core(qkv(x)))
    attn, mlp = by_hand(module.attn, f"{name}.attn"), by_hand(module.mlp, f"{name}.mlp")

    def layer(x):
        x = x + attn(x).to(x.dtype)
        return x + mlp(x).to(x.dtype)

    return layer


QUANTIZED = {
    "LayerNormLinear": lambda recipe: LayerNormLinear(D, 96, name="m", recipe=recipe, bias=True),
    "LayerNormMLP": lambda recipe: LayerNormMLP(D, 96, name="m", recipe=recipe, bias=True),
    "MultiheadAttention": lambda recipe: MultiheadAttention(D, H, name="m", recipe=recipe),
    "TransformerLayer": lambda recipe: TransformerLayer(D, 96, H, name="m", recipe=recipe),
}


@pytest.mark.feature("F65", "F66", "F68")
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_linear_inside_is_quantized_by_the_recipe(name):
    """To the byte what Linears of the recipe compute, forward and backward; high precision computes something else."""
    module = QUANTIZED[name]({"linear": MIXED})
    high = QUANTIZED[name]("bf16")
    high.load_state_dict(module.state_dict())
    results = []
    for function in (module, by_hand(module, "m"), high):
        x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = function(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        results.append((y.detach(), x.grad))
    ours, expected, unquantized = results
    for result, same, other in zip(ours, expected, unquantized, strict=True):
        assert torch.equal(result, same) and not torch.equal(result, other)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_linear_inside_has_the_quantizers_of_the_recipe(name):
    modules = [m for m in quantized_modules(QUANTIZED[name]({"linear": MIXED})) if m.module_type == "linear"]
    assert [m.quantizers.texts() for m in modules] == [MIXED] * len(modules) and modules
