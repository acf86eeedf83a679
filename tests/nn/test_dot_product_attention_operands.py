"""Which values the six products of attention multiply: cuDNN's operands of MXFP8, and NVFP4, by numpy and ml_dtypes.

cuDNN's rule (cudnn-frontend, test/python/sdpa/mxfp8_ref.py) quantizes V twice from the original values: along the
tokens for S V, and along the width of a head for do V^T. Q, K, do and the gradient of the scores have two operands,
too. S is E4M3 under one power of two, 256 in backward.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from hqsweep.nn import dot_product_attention as attention
from hqsweep.nn.dot_product_attention import AttentionCall, DotProductAttention
from hqsweep.sweep.grid.compose import load_recipe

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
PRESETS = ("mxfp8_dpa", "nvfp4_linear_mxfp8_dpa", "nvfp4_dpa")
E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn


def rounded(x, element):
    """float32 x in a number format, saturated, as float32."""
    top = float(ml_dtypes.finfo(element).max)
    return np.clip(x, -top, top).astype(element).astype(np.float32)


def mx(x, element):
    """x [..., n] in blocks of 32 along the last axis, each under the least power of two that saturates nothing."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.float32(1) / np.float32(ml_dtypes.finfo(element).max)
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True) * top)
    scale = np.exp2((exponent - (mantissa == 0.5)).astype(np.float32))
    return (rounded(blocks / scale, element) * scale).reshape(x.shape)


def nvfp4(x):
    """x [..., n] in blocks of 16 along the last axis under E4M3 scales, and one amax of all."""
    f = np.float32
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    encode = f(2688) / np.abs(x).max()
    sf = rounded(np.abs(blocks).max(-1, keepdims=True) * (encode * (f(1) / f(6))), E4M3)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(f(1) / (sf * (f(1) / encode)), np.finfo(f).max)
    return (rounded(blocks * inverse, E2M1) * sf).reshape(x.shape).astype(np.float64) * np.abs(x).max() / 2688


def one_power_of_two(x):
    """x in E4M3 under the largest power of two that saturates nothing."""
    scale = np.float32(2.0 ** math.floor(math.log2(448 / np.abs(x).max())))
    return rounded(x * scale, E4M3) / scale


RULES = {
    "mxfp8": lambda x: mx(x, E4M3),
    "mxfp8+e5m2": lambda x: mx(x, E5M2),
    "nvfp4": nvfp4,
    "fp8_current+pow2": one_power_of_two,
}


def run(name, monkeypatch, device="cpu", inputs=None, causal=True):
    """Run attention of a preset, without +sr.

    Returns the tensors that were quantized, by name ([n, T, C] float32), the six products' operands in order, and o
    and the gradients of q, k and v.
    """
    texts = {tensor: text.removesuffix("+sr") for tensor, text in load_recipe(name)["dpa"].items()}
    module, seen, pairs = DotProductAttention(name="a", recipe=texts), {}, []
    fold, mm_t = AttentionCall.fold, attention.mm_t

    def see(call, tensor, x, **outputs):
        seen[tensor] = x.float().cpu().numpy()
        return fold(call, tensor, x, **outputs)

    def meet(a, b, **options):
        pairs.append(tuple(map(values, (a, b))))
        return mm_t(a, b, **options)

    monkeypatch.setattr(AttentionCall, "fold", see)
    monkeypatch.setattr(attention, "mm_t", meet)
    if inputs is None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4, 2, 3, 64, 32, generator=generator).bfloat16().unbind(0)
    q, k, v, do = (x.to(device) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    o = module(q, k, v, is_causal=causal)
    o.backward(do)
    return texts, seen, pairs, (o, q.grad, k.grad, v.grad)


def values(operand):
    factor = 1 if operand.factor is None else operand.factor.double().cpu().numpy()
    return operand.matrix.double().cpu().numpy() * factor / operand.divisor


def by_rule(texts, seen):
    """The six pairs of operands, by cuDNN's rule for axes."""
    row = {tensor: RULES[texts[tensor]](x) for tensor, x in seen.items()}
    column = {tensor: RULES[texts[tensor]](x.swapaxes(1, 2)) for tensor, x in seen.items()}
    (q, k, v), (q_t, k_t, v_t) = np.split(row["qkv"], 3), np.split(column["qkv"], 3)
    return [
        (q, k), (row["s"], v_t),
        (column["s"], column["do"]), (row["do"], v), (row["dp"], k_t), (column["dp"], q_t),
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", PRESETS)
def test_each_product_reads_the_operands_of_the_rule(name, device, monkeypatch):
    texts, seen, pairs, _ = run(name, monkeypatch, device)
    assert {tensor: x.shape[1:] for tensor, x in seen.items()} == {
        "qkv": (64, 32), "s": (64, 64), "do": (64, 32), "dp": (64, 64)
    }  # fmt: skip
    for got, expected in zip(pairs, by_rule(texts, seen), strict=True):
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0 if "mxfp8" in name else 1e-6, atol=0)


def test_v_is_quantized_once_along_tokens_and_once_along_the_width(monkeypatch):
    """By hand. v[0, 0] is 896 and v[1, 0] is 11 / 1024; all else is 0.

    Along tokens both have the scale 2: 11 / 2048 is 2.75 of E4M3's least steps of 1 / 512, so v[1, 0] becomes
    3 / 512 * 2. Along the width v[1, 0] is alone in its block: 11 / 1024 = 352 * 2^-15, and 352 is a number of E4M3.
    """
    q, k, v, do = torch.zeros(4, 1, 1, 32, 32, dtype=torch.bfloat16).unbind(0)
    v[0, 0, 0, 0], v[0, 0, 1, 0] = 896, 11 / 1024
    _, _, pairs, _ = run("mxfp8_dpa", monkeypatch, inputs=(q, k, v, do))
    of_output, of_backward = pairs[1][1][0], pairs[3][1][0]
    assert of_output[0, :3].tolist() == [896, 3 / 256, 0] and of_backward[:3, 0].tolist() == [896, 11 / 1024, 0]


def test_s_of_causal_attention_is_scaled_by_256(monkeypatch):
    """By hand: equal scores make row t of S 1 / (t + 1). 256 / 3 = 85.3 rounds to 88 in E4M3, 256 / 5 = 51.2 to 52."""
    _, seen, pairs, _ = run("mxfp8_dpa", monkeypatch, inputs=torch.zeros(4, 1, 1, 32, 32, dtype=torch.bfloat16))
    assert seen["s"][0, 4, :6].tolist() == [float(torch.tensor(0.2).bfloat16())] * 5 + [0]
    for s in (pairs[1][0][0], pairs[2][0][0].T):
        assert [s[t, 0] * 256 for t in range(5)] == [256, 128, 88, 64, 52]


def test_outputs_and_gradients_stay_near_cudnns_reference(monkeypatch):
    """S and dS are rounded to bfloat16 first, as here. dq and dk differ by more: the reference sums do * o unquantized,
    and scales dS by 1 / sqrt(E) before it quantizes."""
    texts, seen, _, (o, *gradients) = run("mxfp8_dpa", monkeypatch)
    q, k, v = np.split(seen["qkv"], 3)
    (q, k), (_, v_t), (_, do_t), (do, v), (_, k_t), (_, q_t) = by_rule(texts, seen)
    scores = q @ k.swapaxes(1, 2) / math.sqrt(32) + np.triu(np.full((64, 64), -np.inf), 1)
    s = np.exp(scores - scores.max(-1, keepdims=True))
    s = (s / s.sum(-1, keepdims=True)).astype(ml_dtypes.bfloat16).astype(np.float32)
    s8 = rounded(s * 256, E4M3) / 256
    expected = s8 @ v_t.swapaxes(1, 2)
    delta = (seen["do"] * expected.astype(ml_dtypes.bfloat16).astype(np.float32)).sum(-1, keepdims=True)
    ds = (s * (do @ v.swapaxes(1, 2) - delta)).astype(ml_dtypes.bfloat16).astype(np.float32) / np.float32(math.sqrt(32))
    dq = mx(ds, E4M3) @ k_t.swapaxes(1, 2)
    dk = mx(ds.swapaxes(1, 2), E4M3) @ q_t.swapaxes(1, 2)
    dv = s8.swapaxes(1, 2) @ do_t.swapaxes(1, 2)
    for ours, theirs, most in zip((o, *gradients), (expected, dq, dk, dv), (4e-3, 6e-2, 6e-2, 4e-3), strict=True):
        ours = ours.detach().double().numpy().reshape(theirs.shape)
        assert np.linalg.norm(ours - theirs) < most * np.linalg.norm(theirs)
