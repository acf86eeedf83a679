"""Experts spread over two ranks are those of one process, to the byte."""

import pytest
import torch
from support.nn.expert_parallel import EXPERTS, LOCAL, RANKS, inputs, layer, run, weight
from support.nn.experts import SECTIONS
from support.ranks import run_ranks

COMPOSER_2 = SECTIONS[1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_experts_of_two_ranks_are_those_of_one_process():
    parts = run_ranks(RANKS, run, COMPOSER_2)
    x, chosen, dy = (torch.cat(pair) for pair in zip(*map(inputs, range(RANKS)), strict=True))
    order, module = chosen.argsort(stable=True), layer(COMPOSER_2, EXPERTS)
    with torch.no_grad():
        module.weight.copy_(weight())
    sorted_x = x[order].requires_grad_()
    y = module(sorted_x, torch.bincount(chosen, minlength=EXPERTS))
    y.backward(dy[order])
    home = order.argsort()
    assert torch.equal(torch.cat([part["y"] for part in parts]), y.detach()[home])
    assert torch.equal(torch.cat([part["dx"] for part in parts]), sorted_x.grad[home])
    assert torch.equal(torch.cat([part["dw"] for part in parts]), module.weight.grad)
    assert parts[0]["dw"].shape[0] == LOCAL and y.isfinite().all()
