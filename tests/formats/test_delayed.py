"""FP8 with delayed scaling: what a step leaves to the next, worked out by hand, and codes under a given amax."""

import math

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.formats.fp8 import end_step
from hqsweep.formats.inputs import draw

INF, NAN = math.inf, math.nan


@pytest.mark.feature("F22")
@pytest.mark.parametrize(
    ("history", "amax", "most_recent", "after", "amax_after"),
    [
        ([3, 9, 2], 9, False, [0, 2, 3], 9),  # the oldest counts once more, and is gone
        ([3, 9, 2], 9, True, [0, 2, 3], 3),
        ([0, 9, 2], 5, False, [0, 9, 2], 5),  # a step without an amax does not roll
        ([3], 7, False, [0], 3),
        ([NAN, 4, 2], 5, False, [0, 2, NAN], 4),
        ([NAN, 4, 2], 5, True, [0, 2, NAN], 5),
        ([INF, 4, 2], 5, False, [0, 2, INF], 5),
        ([1, 4, INF], 5, False, [0, INF, 1], 5),
        ([1, 4, INF], 5, True, [0, INF, 1], 1),
    ],
)
def test_what_a_step_leaves_to_the_next(history, amax, most_recent, after, amax_after):
    before = torch.tensor(history, dtype=torch.float32)
    got, amax_got = end_step(before, torch.full((1, 1), float(amax)), most_recent=most_recent)
    assert torch.equal(got.nan_to_num(nan=-1), torch.tensor(after, dtype=torch.float32).nan_to_num(nan=-1))
    assert amax_got.shape == (1, 1) and amax_got.item() == amax_after
    assert torch.equal(before.nan_to_num(nan=-1), torch.tensor(history, dtype=torch.float32).nan_to_num(nan=-1))


@pytest.mark.parametrize(
    ("history", "amax", "most_recent", "after", "amax_after"),
    [
        ([INF, 4, 2], 5, False, [0, 4, 2], 5),  # a step with inf is a step without an amax
        ([INF, 4, 2], 5, True, [0, 4, 2], 5),
        ([NAN, 4, 2], 5, False, [0, 4, 2], 5),
        ([1, 4, INF], 5, False, [0, 0, 1], 4),  # one that is there already counts as none
        ([1, NAN, INF], 5, False, [0, 0, 1], 1),
        ([INF], 7, False, [0], 7),
        ([3, 9, 2], 9, False, [0, 2, 3], 9),  # without any it is the same
        ([3, 9, 2], 9, True, [0, 2, 3], 3),
        ([0, 9, 2], 5, False, [0, 9, 2], 5),
    ],
)
def test_with_skip_nonfinite_the_scale_goes_on_from_the_finite_amaxes(history, amax, most_recent, after, amax_after):
    before, amax = torch.tensor(history, dtype=torch.float32), torch.full((1, 1), float(amax))
    got, amax_got = end_step(before, amax, most_recent=most_recent, skip_nonfinite=True)
    assert got.tolist() == after and amax_got.tolist() == [[amax_after]]
    assert torch.equal(before.nan_to_num(nan=-1), torch.tensor(history, dtype=torch.float32).nan_to_num(nan=-1))


@pytest.mark.parametrize("element", ["", "+e5m2"])
def test_under_its_own_amax_it_is_current_scaling(element):
    delayed, current, x = parse(f"fp8_delayed{element}"), parse(f"fp8_current{element}"), draw("heavy", 48, 64)
    operands, expected = delayed.encode(x, delayed.grid(x)), current.encode(x)
    assert all(torch.equal(operands[name], expected[name]) for name in expected)
    assert torch.equal(delayed.decode(operands, (48, 64)), current.decode(expected, (48, 64)))
    assert torch.equal(delayed.operand(operands, (48, 64)).matrix, current.operand(expected, (48, 64)).matrix)


def test_the_first_step_has_scale_one_and_values_beyond_the_amax_saturate():
    x = torch.tensor([[1.0, -500.0, 3.0]])
    for amax, scale_inv, values in ((0.0, 1.0, [1.0, -448.0, 3.0]), (2.0, 2 / 448, [1.0, -2.0, 2.0])):
        format = parse("fp8_delayed")
        operands = format.encode(x, {"s": torch.full((1, 1), amax)})
        assert operands["s"].item() == pytest.approx(scale_inv, rel=1e-6)
        torch.testing.assert_close(format.decode(operands, (1, 3)), torch.tensor([values]))


def test_without_an_amax_it_cannot_encode():
    with pytest.raises(UserError, match=r"fp8_delayed\+e5m2: encode needs the amax that the state of a slot"):
        parse("fp8_delayed+e5m2").encode(torch.ones(1, 16))
