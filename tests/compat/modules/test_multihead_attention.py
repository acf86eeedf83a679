"""MultiheadAttention by TransformerEngine's arguments against the same weights in plain torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep import compat
from hqsweep.compat import MXFP8BlockScaling, autocast, quantized_model_init

D, H, G, S, B = 64, 4, 2, 8, 2
E = D // H
NO_DROPOUT = {"attention_dropout": 0.0, "bias": False}


def tokens(length: int = S, seed: int = 0) -> Tensor:
    return torch.randn(length, B, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def built(**options: object) -> nn.Module:
    torch.manual_seed(0)
    module = compat.MultiheadAttention(D, H, **NO_DROPOUT | options)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return module


def plain(q: Tensor, k: Tensor, v: Tensor, proj: Tensor, causal: bool = True) -> Tensor:
    """Attention [S, B, D] of q [S, B, heads * E], and k and v of as many groups as they have, then proj."""
    q, k, v = (x.unflatten(-1, (-1, E)).permute(1, 2, 0, 3) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return y.permute(2, 0, 1, 3).flatten(2) @ proj.t()


def rows(weight: Tensor, groups: int, interleaved: bool) -> list[Tensor]:
    """The rows of q, k and v in a joined weight, in the order of heads."""
    if not interleaved:
        return list(weight.split([D, groups * E, groups * E]))
    parts = weight.view(groups, H // groups + 2, E, -1).split([H // groups, 1, 1], dim=1)
    return [part.reshape(-1, weight.shape[1]) for part in parts]


@pytest.mark.parametrize("options", [
    {}, {"num_gqa_groups": G}, {"fuse_qkv_params": True}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    {"fuse_qkv_params": True, "num_gqa_groups": G}, {"input_layernorm": True, "num_gqa_groups": 1},
    {"input_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
], ids=str)  # fmt: skip
def test_self_attention_is_torchs(options):
    module, x = built(**options), tokens()
    groups = options.get("num_gqa_groups", H)
    interleaved = options.get("fuse_qkv_params", False) and options.get("qkv_weight_interleaved", True)
    h = x
    if options.get("input_layernorm"):
        norm = module.layernorm_qkv.norm
        gain = norm.weight + options.get("zero_centered_gamma", False)
        h = F.rms_norm(x, (D,), gain, 1e-5) if norm.bias is None else F.layer_norm(x, (D,), gain, norm.bias)
    weight = module.qkv.weight
    expected = plain(*(h @ part.t() for part in rows(weight, groups, interleaved)), module.proj.weight)
    parameters = [x, *module.parameters()]
    own = torch.autograd.grad(module(x).square().sum(), parameters)
    theirs = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(own, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [
    {}, {"input_layernorm": True}, {"fuse_qkv_params": True}, {"num_gqa_groups": G, "fuse_qkv_params": True,
    "qkv_weight_interleaved": False},
], ids=str)  # fmt: skip
def test_cross_attention_reads_keys_and_values_of_the_encoder(options):
    module = built(attention_type="cross", attn_mask_type="no_mask", **options)
    x, encoded = tokens(), tokens(12, seed=1)
    groups = options.get("num_gqa_groups", H)
    pairs = module.key_value.weight
    if options.get("fuse_qkv_params") and options.get("qkv_weight_interleaved", True):
        pairs = pairs.view(groups, 2, E, D).transpose(0, 1).reshape(-1, D)
    k, v = pairs.chunk(2)
    first = module.layernorm_query if "input_layernorm" in options else module.query_layer
    h = F.layer_norm(x, (D,), first.norm.weight, first.norm.bias) if "input_layernorm" in options else x
    expected = plain(h @ first.weight.t(), encoded @ k.t(), encoded @ v.t(), module.proj.weight, causal=False)
    torch.testing.assert_close(module(x, encoder_output=encoded), expected, rtol=1e-4, atol=1e-5)
    named = {key.replace("._extra_state", "") for key in compat.transformer_engine_state_dict(module)}
    names = {"key_value.weight"} if "fuse_qkv_params" in options else {"key_value.key_weight", "key_value.value_weight"}
    assert names < named
    fresh = built(attention_type="cross", attn_mask_type="no_mask", **options)
    nn.init.zeros_(fresh.key_value.weight)
    fresh.load_state_dict(compat.transformer_engine_state_dict(module))
    assert torch.equal(fresh(x, encoder_output=encoded), module(x, encoder_output=encoded))


def written_rope(x: Tensor, interleaved: bool) -> Tensor:
    """x [S, B, heads, E]; each pair of entries is a complex number that turns by its position."""
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, E, 2) / E)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, dim=-1), dim=-1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    turned = torch.view_as_real(turned)
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_rotary_positions_turn_queries_and_keys(interleaved, form):
    module, x = built(rotary_pos_interleaved=interleaved, qkv_format=form), tokens()
    q, k, v = (x @ part.t() for part in rows(module.qkv.weight, H, False))
    q, k = (written_rope(part.unflatten(-1, (H, E)), interleaved).flatten(2) for part in (q, k))
    angles = compat.RotaryPositionEmbedding(E, interleaved=interleaved)(S + 4)
    own = x if form == "sbhd" else x.transpose(0, 1)
    y = module(own, rotary_pos_emb=angles)
    y = y if form == "sbhd" else y.transpose(0, 1)
    torch.testing.assert_close(y, plain(q, k, v, module.proj.weight), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module(own, rotary_pos_emb=(angles, angles)), module(own, rotary_pos_emb=angles))


def test_positions_may_be_interpolated_and_a_part_of_the_width_rotated():
    angles = compat.RotaryPositionEmbedding(16, rotary_percent=0.5)
    assert angles(3).shape == (3, 1, 1, 8) and torch.equal(angles(3, offset=2)[0], angles(3)[2])
    halved = compat.RotaryPositionEmbedding(
        16, 0.5, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8
    )
    torch.testing.assert_close(halved(8)[6], angles(8)[3])
    torch.testing.assert_close(halved(32)[4], angles(8)[1])


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("before", [False, True])
def test_queries_and_keys_may_be_normed(kind, before):
    module, x = built(qk_norm_type=kind, qk_norm_before_rope=before), tokens()
    angles = compat.RotaryPositionEmbedding(E)(S)
    parts = [(x @ part.t()).unflatten(-1, (H, E)) for part in rows(module.qkv.weight, H, False)]

    def normed(y: Tensor, norm: nn.Module) -> Tensor:
        if kind == "L2Normalization":
            return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        centered = y - y.mean(-1, keepdim=True) if kind == "LayerNorm" else y
        wide = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        return wide + norm.bias if kind == "LayerNorm" else wide

    turned = []
    for y, norm in zip(parts[:2], (module.q_norm, module.k_norm), strict=True):
        turned.append(written_rope(normed(y, norm), False) if before else normed(written_rope(y, False), norm))
    expected = plain(*(y.flatten(2) for y in (*turned, parts[2])), module.proj.weight)
    torch.testing.assert_close(module(x, rotary_pos_emb=angles), expected, rtol=1e-4, atol=1e-5)


def test_results_come_in_the_order_of_theirs():
    x = tokens()
    module = built(input_layernorm=True, return_layernorm_output=True, return_bias=True, bias=True)
    y, bias, normed = module(x)
    assert torch.equal(bias, module.proj.bias)
    torch.testing.assert_close(normed, F.layer_norm(x, (D,), module.qkv.norm.weight, module.qkv.norm.bias))
    summed = built(input_layernorm=True, bias=True)
    summed.load_state_dict(module.state_dict())
    torch.testing.assert_close(y + bias, summed(x))


def test_a_call_of_more_options_is_quantized_as_the_simple_call():
    """With a mask that is written out, linears have the bytes that they have without."""
    module, x = built(input_layernorm=True), tokens()
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    with autocast(recipe=MXFP8BlockScaling()):
        y, masked = module(x), module(x, hidden, attn_mask_type="arbitrary")
    torch.testing.assert_close(masked, y, rtol=1e-2, atol=1e-2)
    assert (module(x) - y).norm() / y.norm() > 1e-3


def test_projections_of_groups_are_held_quantized():
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        held = built(num_gqa_groups=G, kv_channels=32)
    plain_module, x = built(num_gqa_groups=G, kv_channels=32), tokens()
    assert held.qkv.weight.shape == (4 * 32 + 2 * G * 32, D) and held.proj.weight.shape == (D, 4 * 32)
    assert torch.equal(plain_module.qkv.key_weight, plain_module.qkv.weight[128 : 128 + 64])
    with autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(held(x), plain_module(x))


def test_the_default_scale_is_of_the_width_of_heads():
    module = built(kv_channels=32)
    assert module.core_attention.scale == 1 / math.sqrt(32)
