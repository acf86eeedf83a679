"""torch.compile around a grouped linear: graphs break where they must, and every byte stays."""

import pytest
import torch
from experts import EXPERTS, GPU, ROWS, SPLITS, K, N, gradients, held

from hqsweep.formats.inputs import draw
from hqsweep.nn import quantization


@pytest.mark.slow
@pytest.mark.parametrize("splits", [SPLITS, (ROWS // EXPERTS,) * EXPERTS], ids=["loop", "batch"])
def test_a_compiled_module_computes_the_same_bytes(splits):
    """Also after it has been called without: what is known of its formats by then is no part of a trace."""
    runs = []
    for compiled in (False, True):
        torch.compiler.reset()
        module = held("mxfp8", plan_capability=None if splits is SPLITS else GPU)
        call = torch.compile(module, backend="aot_eager") if compiled else module
        x = draw("normal", ROWS, K).requires_grad_()
        for function, step in ((module, 1), (call, 2)):
            with quantization(seed=1, step=step):
                y = function(x, list(splits))
                y.backward(draw("normal", ROWS, N, step))
        runs.append({"y": y.detach(), "x": x.grad} | gradients(module))
    eager, traced = runs
    assert all(torch.equal(traced[name], expected) for name, expected in eager.items())
