"""Tokens on their way to experts and back on a GPU: against torch's gathers and sums in float64."""

import math

import pytest
import torch
from torch import Tensor

from hqsweep.ops.experts import combine_rows, combine_rows_backward, dispatch_rows, place_choices, sum_rows
from hqsweep.ops.splits import PaddedSplits, Splits

pytestmark = pytest.mark.gpu
SHAPES = [(300, 2, 512), (1, 1, 8), (77, 3, 264), (4096, 8, 64), (0, 2, 16), (33, 2, 2048)]
"""M, k, D."""


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def permutation(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(count)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dispatch_gathers_rounded_tokens_and_its_way_back_sums_them(shape, dtype):
    m, k, d = shape
    x, places = draw(m, d, dtype=dtype), permutation(m * k)
    rows = dispatch_rows(x, places, k)
    expected = torch.empty_like(rows)
    expected[places] = x.bfloat16().repeat_interleave(k, dim=0)
    assert torch.equal(rows, expected)
    drows = draw(m * k, d, seed=1)
    sums = drows[places].view(m, k, d)
    total = sum(sums[:, r].float() for r in range(k)) if k else 0
    back = sum_rows(drows, places, k, dtype)
    assert back.dtype is dtype and torch.equal(back, total.bfloat16().to(dtype))


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_combine_is_the_weighted_sum_and_its_way_back_the_gradients(shape, added):
    m, k, d = shape
    rows, weights, dy = draw(m * k, d), draw(m, k, dtype=torch.float32, seed=1), draw(m, d, dtype=torch.float32, seed=2)
    places, more = permutation(m * k), draw(m, d, seed=3) if added else None
    y = combine_rows(rows, places, weights, more)
    parts = rows[places].view(m, k, d)
    expected = torch.zeros(m, d, device="cuda")
    for r in range(k):
        expected += parts[:, r].float() * weights[:, r, None]
    assert torch.equal(y, expected + more.float() if added else expected)
    drows, dweights, *rest = combine_rows_backward(dy, rows, places, weights, added)
    assert torch.equal(drows[places].view(m, k, d), (dy[:, None] * weights[..., None]).bfloat16())
    dots = (dy[:, None].double() * parts.double()).sum(dim=-1)
    size = (dy[:, None].double() * parts.double()).abs().sum(dim=-1)
    assert ((dweights - dots).abs() <= size * 2**-20).all()
    assert [torch.equal(x, dy.bfloat16()) for x in rest] == [True] * added
    again = combine_rows_backward(dy, rows, places, weights, added)
    assert all(map(torch.equal, again, (drows, dweights, *rest)))


@pytest.mark.parametrize("shape", [(300, 2, 64), (5, 1, 8), (64, 4, 264)], ids=str)
def test_experts_are_filled_up_with_zeros(shape):
    """Also one without rows, and one whose rows fill blocks by themselves; the same values at the places of all."""
    m, k, d = shape
    chosen = torch.randint(0, 5, (m, k), generator=torch.Generator().manual_seed(m)).cuda()
    chosen[chosen == 3] = 4
    chosen.flatten()[: min(32, m * k)] = 2
    _, inverse, tokens = place_choices(chosen, 6)
    splits = PaddedSplits.over(Splits.of(tokens, m * k), 32, torch.device("cuda"))
    places = splits.places[inverse]
    x, weights, dy = (draw(m, size, dtype=torch.float32, seed=seed) for seed, size in enumerate((d, k, d)))
    rows = dispatch_rows(x, places, k, splits.starts, splits.rows)
    plain = dispatch_rows(x, inverse, k)
    expected = torch.zeros_like(rows)
    expected[splits.places] = plain
    end = int(splits.starts[1, -1])
    assert len(rows) == splits.rows and torch.equal(rows[:end], expected[:end])
    assert torch.equal(combine_rows(rows, places, weights), combine_rows(plain, inverse, weights))
    assert torch.equal(sum_rows(rows, places, k, torch.float32), sum_rows(plain, inverse, k, torch.float32))
    drows, dweights = combine_rows_backward(dy, rows, places, weights, False, splits.starts)
    plain, same = combine_rows_backward(dy, plain, inverse, weights, False)
    expected.zero_()[splits.places] = plain
    assert torch.equal(drows[:end], expected[:end]) and torch.equal(dweights, same)


def test_specials_stay_in_their_token():
    rows, weights = draw(8, 16), torch.ones(4, 2, device="cuda")
    rows[2, 3], rows[5, 4] = math.nan, math.inf
    y = combine_rows(rows, torch.arange(8, device="cuda"), weights)
    assert y[1, 3].isnan() and y[2, 4].isinf() and y.isfinite().sum() == y.numel() - 2


def test_inputs_with_gaps_and_a_graph():
    m, k, d = 40, 2, 64
    wide = draw(m, 2 * d + 8)
    places, weights = permutation(m * k), draw(m, 2 * k, dtype=torch.float32)
    for x in (wide[:, 3 : 3 + d], wide[:, :d]):
        assert torch.equal(dispatch_rows(x, places, k), dispatch_rows(x.contiguous(), places, k))
    rows = draw(m * k, d)
    assert torch.equal(combine_rows(rows, places, weights[:, ::2]), combine_rows(rows, places, weights[:, ::2].clone()))
    chosen, x = torch.zeros(m, k, dtype=torch.int64, device="cuda"), draw(m, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order, inverse, tokens = place_choices(chosen, 4)
        y = combine_rows(dispatch_rows(x, inverse, k), inverse, weights[:, :k])
    for seed in (1, 2):
        chosen.copy_(torch.randint(0, 4, (m, k), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(order, torch.argsort(chosen.flatten(), stable=True)) and tokens.sum() == m * k
        assert torch.equal(y, combine_rows(dispatch_rows(x, inverse, k), inverse, weights[:, :k]))


def test_what_the_kernels_cannot_take_is_refused():
    x, places = draw(4, 16), permutation(8)
    for wrong, of in ((x.half(), places), (x[:3], places), (x, places[:7]), (x, places.int()), (x[:, :12], places)):
        with pytest.raises(ValueError, match=r"^(x is|places are|places is) "):
            dispatch_rows(wrong, of, 2)
    rows, weights = draw(8, 16), torch.ones(4, 2, device="cuda")
    with pytest.raises(ValueError, match=r"dtype is torch\.float16"):
        sum_rows(rows, places, 2, torch.float16)
    for wrong in ((rows.float(), weights), (rows, weights.double()), (rows[:6], weights), (rows, weights[0])):
        with pytest.raises(ValueError, match=r"^(rows|weights|places) (is|are) "):
            combine_rows(wrong[0], places, wrong[1])
    with pytest.raises(ValueError, match="added is "):
        combine_rows(rows, places, weights, draw(3, 16))
    with pytest.raises(ValueError, match=r"starts (is|are) "):
        dispatch_rows(x, places, 2, places[:6].view(3, 2), 9)
    with pytest.raises(ValueError, match="count is 7, less than the 8 choices"):
        dispatch_rows(x, places, 2, places[:6].view(2, 3), 7)
    with pytest.raises(ValueError, match="rows are 9 for 8 choices"):
        combine_rows_backward(draw(4, 16, dtype=torch.float32), draw(9, 16), places, weights, False)
    with pytest.raises(ValueError, match="dy is "):
        combine_rows_backward(draw(4, 16), rows, places, weights, False)
