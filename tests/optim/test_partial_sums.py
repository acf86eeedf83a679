"""PartialSums: each rank's gradient is rounded by itself, and the sum is the sum that two ranks exchange."""

import pytest
import torch
from support.optim.exchange_ranks import KEY, SHAPES, exchange, partial_gradients
from support.ranks import run_ranks
from torch import nn

from hqsweep.formats import RngKey, parse
from hqsweep.optim.partial_sums import PartialSums, rounded
from hqsweep.recipe.sections import Comm

FORMATS = ["fp32", "bf16", "fp8_current", "fp8_current+e5m2", "fp8_row", "mxfp8", "mxfp4+sr", "nvfp4"]


def summed(text: str, ranks: int) -> dict[str, torch.Tensor]:
    parameters = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)}
    sums = PartialSums(parameters.items(), Comm.parse({"format": text, "ranks": ranks}, "comm"), KEY)
    for rank in range(ranks):
        for name, gradient in partial_gradients(rank).items():
            parameters[name].grad = gradient
        sums.take(rank)
        assert all(p.grad is None for p in parameters.values())
    sums.finish()
    return {name: p.grad for name, p in parameters.items()}


def test_the_sum_is_what_two_ranks_exchange_to_the_bit():
    for theirs in run_ranks(2, exchange, FORMATS, backend="gloo"):
        for text, expected in zip(FORMATS, theirs, strict=True):
            own = summed(text, 2)
            assert all(torch.equal(own[name], value) for name, value in expected.items()), text


def test_ranks_are_added_in_order_in_fp32():
    own, partial = summed("bf16", 4), [partial_gradients(rank) for rank in range(4)]
    for name, gradient in own.items():
        first, *others = (each[name].bfloat16().float() for each in partial)
        for other in others:
            first = first + other
        assert torch.equal(gradient, first)


@pytest.mark.parametrize("text", FORMATS)
def test_rounding_is_the_formats_in_rows_of_memory(text):
    format, gradient = parse(text), torch.randn(4, 96)  # three rows of 128
    key = RngKey(seed=0, slot="x", step=1)
    rows = gradient.view(3, 128)
    expected = format.decode(format.encode(rows, key=key if format.stochastic else None), (3, 128))
    assert torch.equal(rounded(gradient, format, key), expected.view(4, 96))
    filled = rounded(gradient.view(-1)[:70], format, key)
    assert filled.shape == (70,) and (filled - gradient.view(-1)[:70]).abs().max() < 1.5


def test_random_bits_differ_between_ranks_and_steps():
    format, gradient = parse("mxfp4+sr"), torch.randn(1024)
    keys = [KEY.under("0"), KEY.under("1"), RngKey(seed=3, slot="comm/0", step=8)]
    values = [rounded(gradient, format, key) for key in keys]
    assert not torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    assert torch.equal(values[0], rounded(gradient, format, keys[0]))


def test_a_low_precision_gradient_is_summed_in_fp32():
    p = nn.Parameter(torch.zeros(128, dtype=torch.bfloat16))
    sums = PartialSums([("p", p)], Comm.parse({"format": "fp32", "ranks": 3}, "comm"), KEY)
    for rank, value in enumerate((1.0, 2.0**-8, 2.0**-8)):
        p.grad = torch.full((128,), value, dtype=torch.bfloat16)
        sums.take(rank)
    sums.finish()
    assert p.grad.dtype == torch.bfloat16 and (p.grad == 1 + 2.0**-7).all()
