"""What the host does in a step, counted in calls of Python functions: unlike a time, a count is the same anywhere.

A bound is what a step needs and a few calls more. Whoever has to raise one makes every eager step of every layer wait.
"""

import sys

import pytest
import torch
from experts import EXPERTS, ROWS, K, N, grouped

from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization

EQUAL = [ROWS // EXPERTS] * EXPERTS


def calls_of(module, *arguments, cached):
    """Of functions of hqsweep, in a forward and backward that is neither the first nor the second."""
    x, dy = (draw("normal", ROWS, width).bfloat16() for width in (K, N))
    x.requires_grad_()
    seen = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("hqsweep"):
            seen.append(frame.f_code.co_qualname)

    def step():
        with quantization(cache_weights=cached):
            y = module(x, *arguments)
        y.backward(dy)

    step(), step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert any("LinearFunction.backward" in name for name in seen)
    # Of dataclasses: keys of a cache are compared where another test has put equal ones there.
    return sum(not name.endswith("__eq__") for name in seen)


@pytest.mark.parametrize(("text", "cached", "bound"), [
    ("mxfp8", False, 260), ("mxfp8", True, 244), ("nvfp4", False, 269), ("nvfp4", True, 253),
])  # fmt: skip
@pytest.mark.parametrize("single", [False, True])
def test_a_step_of_a_grouped_linear(text, cached, bound, single, monkeypatch):
    """By the plans of a GPU."""
    monkeypatch.setattr("hqsweep.gemm.grouped.has_kernel", lambda device, majors: True)
    module = grouped(text, single_grouped_weight=single).to(torch.bfloat16)
    assert calls_of(module, EQUAL, cached=cached) <= bound


@pytest.mark.parametrize(("text", "cached", "bound"), [
    ("mxfp8", False, 242), ("mxfp8", True, 198), ("nvfp4", False, 260), ("nvfp4", True, 216),
])  # fmt: skip
def test_a_step_of_a_linear(text, cached, bound):
    module = Linear(K, N, name="layer", recipe=text).to(torch.bfloat16)
    assert calls_of(module, cached=cached) <= bound
