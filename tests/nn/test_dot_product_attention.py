"""DotProductAttention: against torch's own attention, against the formulas on decoded operands, and its refusals."""

import math

import pytest
import torch
import torch.nn.functional as F

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.nn.core.context import quantization
from hqsweep.nn.core.module import set_recipe
from hqsweep.nn.core.probe import Probe
from hqsweep.nn.dot_product_attention import TENSORS, AttentionCall, DotProductAttention, quantized_attention
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import QuantizerRole, Recipe

SHAPE = (2, 3, 128, 32)  # batch, heads, positions, width
RECIPES = {
    "fp8_current": dict.fromkeys(TENSORS, "fp8_current"),
    "mxfp8": dict.fromkeys(TENSORS, "mxfp8"),
    "gradients in e5m2": {"qkv": "fp8_current", "s": "fp8_current", "do": "fp8_current+e5m2", "dp": "fp8_current+e5m2"},
    "a format each": {"qkv": "nvfp4|mxfp8", "s": "mxfp8|fp8_current", "do": "bf16|nvfp4", "dp": "fp8_block|bf16"},
    "rounded once": dict.fromkeys(TENSORS, "nvfp4|mxfp8@rowwise_dequantized"),
}


def attention(texts, dtype=torch.bfloat16):
    return DotProductAttention(name="layers.0.attn", recipe=texts, dtype=dtype)


def tensors(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator).bfloat16().to(device).requires_grad_() for _ in range(3)]
    return inputs, torch.randn(SHAPE, generator=generator).bfloat16().to(device)


def run(module, device="cpu", causal=True):
    (q, k, v), do = tensors(device)
    o = module(q, k, v, is_causal=causal)
    o.backward(do)
    return o, q.grad, k.grad, v.grad


def by_formula(texts, device="cpu", causal=True):
    """The same with decoded operands in float64 (S and dS in bfloat16, as they are quantized), head by head."""
    (q, k, v), do = tensors(device)
    quantizer = {tensor: HybridQuantizer.parse(text) for tensor, text in texts.items()}

    def both(tensor, x):
        operands = quantizer[tensor].quantize(x.reshape(-1, x.shape[-1]))
        row = operands.rowwise.dequantize(torch.float64).view(x.shape)
        column = operands.columnwise.dequantize(torch.float64).t().reshape(x.shape)
        return row, column

    row, column = both("qkv", torch.stack([q, k, v]).detach())
    scale = 1 / math.sqrt(SHAPE[-1])
    scores = row[0] @ row[1].mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(128, 128, device=device).bool().triu(1), -torch.inf)
    s = scores.softmax(-1).bfloat16()
    s_row, s_column = both("s", s)
    do_row, do_column = both("do", do)
    ds = do_row @ row[2].mT
    ds = (s.double() * (ds - (ds * s.double()).sum(-1, keepdim=True))).bfloat16()
    ds_row, ds_column = both("dp", ds)
    return (
        s_row @ column[2], ds_row @ column[1] * scale, ds_column.mT @ column[0] * scale, s_column.mT @ do_column
    )  # fmt: skip


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.feature("F68")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_the_six_products_follow_the_formulas(name, causal, device):
    for actual, expected in zip(
        run(attention(RECIPES[name]), device, causal), by_formula(RECIPES[name], device, causal), strict=True
    ):
        # a rare element of S or dS falls on the other side of a rounding in bfloat16
        assert distance(actual, expected) < 4e-3


@pytest.mark.parametrize("texts", [RECIPES["mxfp8"], RECIPES["gradients in e5m2"]])
def test_quantized_attention_stays_near_torchs_own(texts):
    (q, k, v), do = tensors()
    o = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    o.backward(do.float())
    for actual, expected in zip(run(attention(texts)), (o, q.grad, k.grad, v.grad), strict=True):
        assert 1e-3 < distance(actual, expected) < 0.12


def test_high_precision_is_torchs_own():
    (q, k, v), _ = tensors()
    module = attention(dict.fromkeys(TENSORS, "bf16"))
    assert module.high_precision
    assert torch.equal(module(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_mixed_high_precision_runs_the_six_products():
    mixed = attention({"qkv": "bf16", "s": "bf16", "do": "bf16", "dp": "fp32"})
    assert not mixed.high_precision
    for actual, expected in zip(run(mixed), by_formula({t: "bf16" for t in TENSORS}), strict=True):
        assert distance(actual, expected) < 4e-3


def test_stochastic_rounding_repeats_with_its_key():
    texts = RECIPES["mxfp8"] | {"do": "nvfp4+sr", "dp": "nvfp4+sr"}
    with quantization(seed=1, step=2):
        first, again = run(attention(texts)), run(attention(texts))
    with quantization(seed=1, step=3):
        other = run(attention(texts))
    assert all(map(torch.equal, first, again))
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def test_roles_are_in_slot_order():
    roles = [str(role) for role in attention(RECIPES["mxfp8"]).slot_roles().values()]
    assert roles == [*(f"layers.0.attn/dpa/{tensor}" for tensor in ("qkv", "s", "do", "dp")), "None", "None"]


def test_a_context_that_blocks_do_not_divide_is_refused():
    x = torch.zeros(1, 1, 48, 32, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"layers\.0\.attn dpa: qkv columnwise mxfp8: the context has 48 positions"):
        attention(RECIPES["mxfp8"])(x, x, x)
    attention(RECIPES["fp8_current"])(x, x, x)


def test_a_factor_per_row_is_refused():
    with pytest.raises(UserError, match=r"dpa: qkv nvfp4\+row_scaled: attention takes one global amax"):
        run(attention(RECIPES["mxfp8"] | {"qkv": "nvfp4+row_scaled|mxfp8"}))


@pytest.mark.feature("T27")
def test_the_probe_sees_every_tensor_in_both_directions():
    probe = Probe(step=3)
    with quantization(step=3, probe=probe):
        run(attention(RECIPES["a format each"]))
    seen = {(r["tensor"], r["direction"]): r["format"] for r in probe.rows}
    assert seen == {
        (tensor, direction): getattr(HybridQuantizer.parse(text), direction).text
        for tensor, text in RECIPES["a format each"].items()
        for direction in ("rowwise", "columnwise")
    }
    sqnr = {(r["tensor"], r["direction"]): r["sqnr_db"] for r in probe.rows}
    assert 18 < sqnr["qkv", "rowwise"] < 22 and 28 < sqnr["qkv", "columnwise"] < 34


@pytest.mark.feature("F8")
@pytest.mark.parametrize("quantizers", ["fp8_current", "bf16"])
@pytest.mark.parametrize("slot", ["output", "grad_input"])
def test_a_boundary_is_rounded_to_the_values_of_its_reader(slot, quantizers):
    """grad_input is of queries, keys and values together, which share one amax."""
    recipe = {"linear": "bf16", "dpa": quantizers, "overrides": [{"name": "next", "linear": "fp8_current"}]}
    plain, module = attention(quantizers), attention(quantizers)
    setattr(module, module.BOUNDARIES[slot], QuantizerRole("linear", "input", "next"))
    assert set_recipe(module, Recipe.from_config(recipe)) == 1
    expected, actual, format = list(run(plain)), run(module), parse("fp8_current")
    where = slice(0, 1) if slot == "output" else slice(1, 4)
    rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in expected[where]]).bfloat16()
    values = format.decode(format.encode(rows), tuple(rows.shape)).bfloat16().chunk(len(expected[where]))
    expected[where] = [v.view(x.shape).to(x.dtype) for v, x in zip(values, expected[where], strict=True)]
    assert all(torch.equal(a.to(e.dtype), e) for a, e in zip(actual, expected, strict=True))
    assert not torch.equal(torch.cat(values), rows)


@pytest.mark.feature("H42")
@pytest.mark.parametrize("masked", ["bool", "float", "no"])
def test_masks_and_sinks_are_those_of_the_formula(masked):
    """In float32 but for one rounding of dS to bfloat16, for the gradient of k; the first row attends to nothing."""
    quantizers = dict.fromkeys(TENSORS, "fp32") | {"dp": "fp32|bf16"}
    module, generator = attention(quantizers, torch.float32), torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, 3, 16, 8, generator=generator) for _ in range(4))
    sinks = torch.randn(3, generator=generator) if masked != "no" else None
    allowed = torch.rand(2, 1, 16, 16, generator=generator) < 0.5
    allowed[:, :, 0] = False
    mask = {"bool": allowed, "float": torch.where(allowed, 0.0, -1e9), "no": None}[masked]

    def formula(q, k, v, sinks):
        scores = q @ k.mT * 0.3
        if mask is not None:
            scores = scores + torch.where(allowed, 0.0, -1e9)
            scores = torch.cat([scores, sinks.view(1, 3, 1, 1).expand(2, 3, 16, 1)], dim=-1)
        return scores.softmax(dim=-1)[..., :16] @ v

    def ours(q, k, v, sinks):
        call = AttentionCall(**module.call_facts(), causal=False, scale=0.3)
        return quantized_attention(q, k, v, call, mask=mask, sinks=sinks)

    results = []
    for attend in (formula, ours):
        inputs = [x if x is None else x.clone().requires_grad_() for x in (q, k, v, sinks)]
        o = attend(*inputs)
        o.backward(do)
        results.append((o, *(x.grad for x in inputs if x is not None)))
    for index, (expected, got) in enumerate(zip(*results, strict=True)):
        assert torch.allclose(got, expected, rtol=0, atol=2e-2 if index == 2 else 1e-5), index


def test_a_row_that_attends_to_nothing_is_zero():
    module = attention(dict.fromkeys(TENSORS, "fp32") | {"dp": "fp32|bf16"}, torch.float32)
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril(-1)
    o = quantized_attention(q, k, v, AttentionCall(**module.call_facts(), causal=False), mask=mask)
    gradient = torch.autograd.grad(o.sum(), q)[0]
    assert (o[:, :, 0] == 0).all() and gradient.isfinite().all()
    assert torch.allclose(o, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=1e-6)
