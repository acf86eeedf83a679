"""benchmarks/offload.py: the cases it compares compute the same, and its floors are counted right."""

import pytest
import torch

from benchmarks import offload
from hqsweep.config.model import ModelConfig

CONFIG = ModelConfig(dim=128, layers=2, heads=4)
TOKENS = torch.arange(2 * 64).view(2, 64) % 7


def training(case, recipe="mxfp8"):
    torch.manual_seed(0)
    return offload.Training(case, offload.RECIPES[recipe], CONFIG, TOKENS)


def test_every_case_has_the_same_gradients():
    grads = []
    for case in offload.CASES:
        a = training(case)
        a.step()
        grads.append([p.grad for p in a.model.parameters()])
    assert all(torch.equal(x, y) for other in grads[1:] for x, y in zip(grads[0], other, strict=True))


def test_less_waits_of_layers_that_are_computed_again():
    waiting, again = (training(case).host_bytes() for case in ("offload", "recompute=layer offload"))
    assert 4 * TOKENS.numel() * CONFIG.dim * CONFIG.layers <= again < waiting / 4
    assert training("none").host_bytes() == 0


@pytest.mark.gpu
def test_bytes_that_wait_are_those_of_the_docstring():
    """On a CPU they are more: attention is float32 there, and norms save what they were made of."""
    config = ModelConfig(dim=512, layers=8, heads=8)
    tokens = torch.zeros(4, 512, dtype=torch.int64, device="cuda")
    waiting = offload.Training("offload", "mxfp8", config, tokens).host_bytes()
    assert waiting == pytest.approx(33 * tokens.numel() * config.dim * config.layers, rel=0.1)


def test_flops_of_the_docstring():
    forward = offload.forward_tflop(ModelConfig(dim=2048, layers=8, heads=16), 8, 2048)
    assert forward["linears"] == pytest.approx(13.2, rel=0.01) and forward["attention"] == pytest.approx(1.1, rel=0.01)
    extra = {case: offload.extra_tflop(case, forward) for case in offload.CASES}
    assert extra["none"] == extra["offload"] == 0 and extra["recompute=attention"] == forward["attention"]
    assert extra["recompute=layer"] == extra["recompute=layer offload"] == sum(forward.values())
