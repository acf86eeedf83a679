"""DotProductAttention by TransformerEngine's arguments is a softmax that is written out, and hqsweep.nn's attention."""

import math

import pytest
import torch
from torch import Tensor

from hqsweep import compat
from hqsweep.compat import CustomRecipe, DType, Float8CurrentScalingQuantizer, IdentityQuantizer, autocast
from hqsweep.errors import UserError
from hqsweep.nn import DotProductAttention

B, H, G, S, K, E = 2, 4, 2, 6, 8, 16


def heads(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def inputs(queries: int = S, keys: int = S, groups: int = H, width: int = E) -> list[Tensor]:
    """q [B, Tq, H, E], k and v [B, Tk, G, E]."""
    return [heads(B, queries, H, E, seed=0), heads(B, keys, groups, E, seed=1), heads(B, keys, groups, width, seed=2)]


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None = None,
    added: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(E) + added) v in float64, with -inf where hidden, and exp(sink) in each sum."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q.double(), k.double()) / math.sqrt(q.shape[-1])
    scores = scores if added is None else scores + added
    scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.double().exp().view(1, -1, 1, 1))
    share = torch.where(total > 0, weights / total, 0.0)
    return torch.einsum("bhqk,bkhe->bqhe", share, v.double()).flatten(2)


ROWS, COLUMNS = torch.arange(S)[:, None], torch.arange(K)[None]
BIAS = torch.randn(1, H, S, K, generator=torch.Generator().manual_seed(5))
ARBITRARY = torch.rand(B, 1, S, K, generator=torch.Generator().manual_seed(6)) < 0.4
ENDS_Q, ENDS_K = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 13], dtype=torch.int32)
PADDED_Q, PADDED_K = torch.arange(S)[None] >= ENDS_Q.diff()[:, None], torch.arange(K)[None] >= ENDS_K.diff()[:, None]
PADDED = PADDED_Q[:, None, :, None] | PADDED_K[:, None, None]
MASKS = (PADDED_Q[:, None, None], PADDED_K[:, None, None])
ENDS = {"cu_seqlens_q": ENDS_Q, "cu_seqlens_kv": ENDS_K}
SLOPES = torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(H)]).view(1, H, 1, 1)
LAST = (ENDS_K.diff() - ENDS_Q.diff()).view(B, 1, 1, 1)
CASES = {
    "no mask": ({"attn_mask_type": "no_mask"}, {}, {}),
    "causal": ({}, {}, {"hidden": COLUMNS > ROWS}),
    "ends at the last": ({"attn_mask_type": "causal_bottom_right"}, {}, {"hidden": COLUMNS > ROWS + K - S}),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {"attention_mask": ARBITRARY}, {"hidden": ARBITRARY}),
    "padding": ({"attn_mask_type": "padding"}, {"attention_mask": MASKS}, {"hidden": PADDED}),
    "padding by lengths": ({"attn_mask_type": "padding"}, ENDS, {"hidden": PADDED}),
    "padding and causal": ({"attn_mask_type": "padding,causal"}, ENDS, {"hidden": PADDED | (COLUMNS > ROWS)}),
    "padding, ends at the last": (
        {"attn_mask_type": "padding_causal_bottom_right"}, ENDS, {"hidden": PADDED | (COLUMNS > ROWS + LAST)}
    ),
    "window": (
        {"attn_mask_type": "no_mask", "window_size": (2, 1)}, {},
        {"hidden": (COLUMNS < ROWS + K - S - 2) | (COLUMNS > ROWS + K - S + 1)},
    ),
    "causal window of a call": ({}, {"window_size": (1, 0)}, {"hidden": (COLUMNS > ROWS) | (COLUMNS < ROWS - 1)}),
    "another mask in a call": ({}, {"attn_mask_type": "no_mask"}, {}),
    "bias": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
        {"added": BIAS},
    ),
    "bias before the scale": (
        {}, {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS},
        {"added": BIAS / 4, "hidden": COLUMNS > ROWS},
    ),
    "alibi": (
        {"attn_mask_type": "no_mask"}, {"core_attention_bias_type": "alibi"},
        {"added": -SLOPES * (COLUMNS - ROWS - (K - S)).abs()},
    ),
    "alibi of a call": (
        {}, {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES.flatten() * 3},
        {"added": -3 * SLOPES * (COLUMNS - ROWS).abs(), "hidden": COLUMNS > ROWS},
    ),
    "off by one": ({"softmax_type": "off-by-one"}, {}, {"sink": torch.zeros(H), "hidden": COLUMNS > ROWS}),
}  # fmt: skip
"""Case -> arguments of the module and of the call, and what they mean. There are more keys than queries."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["bshd", "sbhd"])
def test_it_is_a_softmax_that_is_written_out(case, form):
    built, called, meaning = CASES[case]
    module = compat.DotProductAttention(H, E, G, qkv_format=form, **built)
    q, k, v = inputs(S, K, G)
    expected = written_out(q, k, v, **meaning)
    given = [x.transpose(0, 1) if form == "sbhd" else x for x in (q, k, v)]
    y = module(*given, **called)
    y = y.transpose(0, 1) if form == "sbhd" else y
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    weight = heads(B, S, H * E, seed=9).detach()
    own = torch.autograd.grad((y * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for a, b in zip(own, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_learnable_sink_is_a_parameter_with_a_gradient():
    module = compat.DotProductAttention(H, E, softmax_type="learnable", qkv_format="bshd", attn_mask_type="no_mask")
    assert [(name, tuple(p.shape)) for name, p in module.named_parameters()] == [("softmax_offset", (1, H, 1, 1))]
    sink = torch.randn(H, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with torch.no_grad():
        module.softmax_offset.copy_(sink.view(1, H, 1, 1))
    q, k, v = inputs()
    y, expected = module(q, k, v), written_out(q, k, v, sink=sink)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    (gradient,) = torch.autograd.grad(expected.square().sum(), sink)
    torch.testing.assert_close(module.softmax_offset.grad.flatten(), gradient, rtol=1e-4, atol=1e-5)


def test_values_may_be_wider_than_keys_and_the_scale_is_chosen():
    q, k, v = inputs(width=24)
    module = compat.DotProductAttention(H, (E, 24), qkv_format="bshd", softmax_scale=0.5, attn_mask_type="no_mask")
    expected = written_out(q * 0.5 * math.sqrt(E), k, v)
    torch.testing.assert_close(module(q, k, v).double(), expected, rtol=1e-5, atol=1e-5)


def test_sequences_one_after_the_other_are_each_by_itself():
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    q, k, v = (heads(10, H, E, seed=i) for i in range(3))
    module = compat.DotProductAttention(H, E, qkv_format="thd", attn_mask_type="padding_causal")
    y = module(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts)
    alone = compat.DotProductAttention(H, E, qkv_format="bshd")
    for first, end in ((0, 3), (4, 9)):
        torch.testing.assert_close(y[first:end], alone(*(x[None, first:end] for x in (q, k, v)))[0])
    assert not y[3].any() and not y[9].any() and y.shape == (10, H * E)


@pytest.mark.parametrize("axis", [-2, -3])
def test_q_k_and_v_may_come_in_one_tensor(axis):
    q, k, v = inputs()
    module = compat.DotProductAttention(H, E, qkv_format="bshd")
    expected = module(q, k, v)
    joined = torch.stack([q, k, v], dim=axis)
    assert torch.equal(module(qkv_layer=joined, qkv_interleave_dim=axis), expected)
    pair = torch.stack([k, v], dim=axis)
    assert torch.equal(module(q, kv_layer=pair, qkv_interleave_dim=axis), expected)
    with pytest.raises(UserError, match="a call takes query_layer, key_layer and value_layer"):
        module(q)


def test_dropout_is_drawn_in_training_only_and_recomputed_alike():
    q, k, v = inputs()
    module = compat.DotProductAttention(H, E, attention_dropout=0.5, qkv_format="bshd", attn_mask_type="no_mask")
    torch.manual_seed(1)
    dropped = module(q, k, v)
    torch.manual_seed(1)
    again = module(q, k, v, checkpoint_core_attention=True)
    assert torch.equal(dropped, again)
    gradients = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (dropped, again)]
    assert all(map(torch.equal, *gradients))
    plain = written_out(q, k, v)
    assert not torch.allclose(dropped.double(), plain, rtol=1e-3)
    torch.testing.assert_close(module.eval()(q, k, v).double(), plain, rtol=1e-5, atol=1e-5)


def test_the_largest_score_of_each_head_is_returned():
    q, k, v = inputs()
    module = compat.DotProductAttention(H, E, return_max_logit=True, qkv_format="bshd")
    y, largest = module(q, k, v)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / 4
    seen = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(largest, seen.amax(dim=(0, 2, 3)))
    assert torch.equal(y, compat.DotProductAttention(H, E, qkv_format="bshd")(q, k, v))


def fp8(role):
    return (
        Float8CurrentScalingQuantizer(DType.kFloat8E4M3) if role and role.module_type == "dpa" else IdentityQuantizer()
    )


def test_a_recipe_that_quantizes_it_gives_the_bytes_of_ours():
    recipe = CustomRecipe(fp8, fp8_dpa=True)
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in inputs())
    ours, theirs = DotProductAttention(name="a", recipe="fp8_current"), compat.DotProductAttention(H, E, name="a")
    with autocast(recipe=recipe):
        y = theirs(q, k, v, qkv_format="bshd")
        expected = ours(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2).flatten(2)
    gradients = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (y, expected)]
    assert torch.equal(y, expected) and all(map(torch.equal, *gradients))
    assert not torch.equal(y, theirs(q, k, v, qkv_format="bshd"))


def test_a_recipe_that_quantizes_it_takes_masks_and_sinks():
    q, k, v = (x.detach().bfloat16() for x in inputs())
    hidden = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(6)) < 0.3
    module = compat.DotProductAttention(H, E, softmax_type="off-by-one", attn_mask_type="arbitrary", qkv_format="bshd")
    with autocast(recipe=CustomRecipe(fp8, fp8_dpa=True)):
        y = module(q, k, v, hidden)
        with pytest.raises(UserError, match="dpa: quantized attention takes as many queries as keys"):
            module(q[:, :4], k, v, hidden)
    expected = written_out(q, k, v, hidden=hidden, sink=torch.zeros(H))
    assert (y - expected).norm() / expected.norm() < 0.1
    assert not torch.equal(y, module(q, k, v, hidden))
