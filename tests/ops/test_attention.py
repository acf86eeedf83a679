"""Rotary positions on a GPU against complex numbers in float64, and what the operators refuse."""

import math

import pytest
import torch
from torch import Tensor

from hqsweep.ops.attention import join_heads, rope, rope_

BASE = 10000.0
SHAPES = [(2, 37, 3, 64), (1, 300, 6, 128), (3, 5, 1, 8), (2, 9, 5, 96), (1, 3, 2, 512), (1, 1, 1, 64), (2, 70, 2, 264)]
"""B, T, H, E: also more and fewer chunks of a head than a warp has threads, and neither a multiple of the other."""


def turned(x: Tensor, base: float | None, sign: int = 1) -> Tensor:
    """x [B, T, H, E] in float64, turned in complex numbers by the angles of float32."""
    if base is None:
        return x.double()
    t, width = x.shape[1], x.shape[-1]
    frequency = torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float32)
    angle = (torch.arange(t, dtype=torch.float32)[:, None] * frequency).double().to(x.device)
    turn = torch.polar(torch.ones_like(angle), sign * angle)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turn).flatten(-2)


def projection(b: int, t: int, h: int, e: int) -> Tensor:
    generator = torch.Generator().manual_seed(b + t + h + e)
    return torch.randn(b, t, 3 * h * e, generator=generator).bfloat16().cuda()


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """Half a unit in the last place of bfloat16, a little more for sums in float32 that fall beside a tie or cancel;
    and nearly all elements are the rounded ones."""
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=2**-12)
    assert (actual == expected.to(torch.bfloat16)).double().mean() > 0.995


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_and_keys_turn_by_their_positions(shape):
    b, t, h, e = shape
    qkv = projection(*shape)
    thirds = qkv.view(b, t, 3, h, e)
    out = rope(qkv, h, BASE)
    for part in range(2):
        assert_rounded(out[:, :, part], turned(thirds[:, :, part], BASE))
    assert torch.equal(rope(qkv, h, BASE), out)
    changed = qkv.clone()
    rope_(changed, h, BASE, False)
    assert torch.equal(changed.view(b, t, 3, h, e)[:, :, :2], out)
    assert torch.equal(changed.view(b, t, 3, h, e)[:, :, 2], thirds[:, :, 2])
    back = qkv.clone()
    rope_(back, h, BASE, True)
    assert torch.equal(back, join_heads(*(x.transpose(1, 2) for x in thirds.unbind(2)), BASE))


LAYOUTS = {
    "rows of heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a head after the other": lambda x: x.contiguous(),
    "a third of a larger tensor": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "one for all heads": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.gpu
@pytest.mark.parametrize("base", [BASE, 500.0, None])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_turned_back_and_joined(shape, layout, base):
    b, t, h, e = shape
    parts = [LAYOUTS[layout](x) for x in projection(*shape).view(b, t, 3, h, e).permute(2, 0, 3, 1, 4)]
    joined = join_heads(*parts, base).view(b, t, 3, h, e)
    for part in range(2):
        expected = turned(parts[part].transpose(1, 2), base, sign=-1)
        if base is None:
            assert torch.equal(joined[:, :, part].double(), expected)
        else:
            assert_rounded(joined[:, :, part], expected)
    assert torch.equal(joined[:, :, 2], parts[2].transpose(1, 2))


@pytest.mark.gpu
def test_an_angle_is_the_product_in_float32_and_specials_stay_in_their_pair():
    """At position 4095 the pair with frequency 1 turns by 4095, far from any short range of sine and cosine."""
    t, e = 4096, 16
    qkv = torch.ones(1, t, 3 * e, dtype=torch.bfloat16, device="cuda")
    expected = [math.cos(t - 1) - math.sin(t - 1), math.sin(t - 1) + math.cos(t - 1)]
    assert rope(qkv, 1, BASE)[0, -1, 0, 0, :2].tolist() == torch.tensor(expected).bfloat16().tolist()
    qkv[0, 7, 2], qkv[0, 7, 5] = math.nan, math.inf
    q, k = rope(qkv, 1, BASE)[0, 7]
    assert q[0, 2:4].isnan().all() and not q[0, 4:6].isfinite().any()
    assert q[0, :2].isfinite().all() and q[0, 6:].isfinite().all() and k.isfinite().all()


@pytest.mark.gpu
def test_nothing_and_graphs():
    assert rope(torch.empty(0, 4, 48, dtype=torch.bfloat16, device="cuda"), 2, BASE).shape == (0, 4, 2, 2, 8)
    empty = torch.empty(2, 3, 0, 8, dtype=torch.bfloat16, device="cuda")
    assert join_heads(empty, empty, empty, BASE).shape == (2, 0, 72)
    qkv = projection(2, 40, 3, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # of a width and base that were not asked for before
        out = rope(qkv, 3, 77.0)
    for seed in (1, 2):
        qkv.copy_(torch.randn(qkv.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, rope(qkv, 3, 77.0))


@pytest.mark.gpu
def test_what_the_kernels_cannot_read_is_copied_but_not_changed_in_place():
    b, t, h, e = 2, 6, 2, 16
    qkv = projection(b, t, h, e)
    shifted = torch.cat([qkv, qkv], dim=-1)[..., 3 : 3 + 3 * h * e]
    spread = torch.stack([qkv, qkv], dim=-1)[..., 0]
    for x in (shifted, spread, qkv.transpose(0, 1)):
        assert torch.equal(rope(x, h, BASE), rope(x.clone(memory_format=torch.contiguous_format), h, BASE))
    for x in (shifted, spread):
        with pytest.raises(ValueError, match=r"with strides .*, which the kernels cannot write in place"):
            rope_(x, h, BASE, False)
    q = qkv.view(b, t, 3, h, e)[:, :, 0].transpose(1, 2)
    odd = torch.cat([q, q], dim=-1)[..., 3 : 3 + e]
    assert torch.equal(join_heads(odd, q, odd, BASE), join_heads(odd.clone(), q, odd.contiguous(), BASE))


@pytest.mark.gpu
def test_what_the_kernels_cannot_take_is_refused():
    qkv = projection(2, 4, 2, 16)
    for wrong in (qkv.float(), qkv[0], qkv[..., :90], qkv[..., :72]):
        with pytest.raises(ValueError, match=r"qkv is .*; it takes bfloat16 \[B, T, 3 \* 2 \* E\]"):
            rope(wrong, 2, BASE)
        with pytest.raises(ValueError, match="qkv is "):
            rope_(wrong, 2, BASE, False)
    with pytest.raises(ValueError, match="qkv is "):
        rope(qkv, 0, BASE)
    q = torch.zeros(2, 2, 4, 16, dtype=torch.bfloat16, device="cuda")
    for wrong in (q.float(), q[:, :1], q.transpose(2, 3), q[..., :12], q[0]):
        with pytest.raises(ValueError, match=r"a gradient is .*; it takes three bfloat16 \[B, H, T, E\]"):
            join_heads(q, wrong, q, BASE)
