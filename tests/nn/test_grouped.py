"""Rows that go to places and come back."""

import pytest
import torch

from hqsweep.nn.grouped import place_rows, take_rows

PLACES = torch.tensor([3, 0, 4])


def test_rows_come_back_and_the_rest_is_zero():
    x = torch.randn(3, 2)
    placed = place_rows(x, PLACES, 6)
    assert torch.equal(take_rows(placed, PLACES), x) and torch.equal(placed[PLACES], x)
    assert placed.shape == (6, 2) and not placed[[1, 2, 5]].any()


def test_gradients_are_those_of_torch():
    """Both have torch's gradients, and so do their gradients, of the cube of what comes back."""
    x, y = (torch.randn(rows, 2, requires_grad=True) for rows in (3, 6))
    for tensor, ours, theirs in (
        (x, lambda t: place_rows(t, PLACES, 6), lambda t: torch.zeros(6, 2).index_put((PLACES,), t)),
        (y, lambda t: take_rows(t, PLACES), lambda t: t[PLACES]),
    ):
        grads = []
        for function in (ours, theirs):
            (first,) = torch.autograd.grad((function(tensor) ** 3).sum(), tensor, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), tensor)
            grads.append((first.detach(), second))
        assert all(map(torch.equal, *grads)) and grads[0][1].any()


@pytest.mark.feature("H27")
def test_a_zero_keeps_its_sign():
    """A sum with zeros would lose it, and a code with a sign would become one without."""
    y = torch.ones(6, 1, requires_grad=True)
    take_rows(y, PLACES).backward(torch.full((3, 1), -0.0))
    assert torch.equal(torch.signbit(y.grad).flatten().nonzero().flatten(), PLACES.sort().values)
