"""Converted modules know that they were called, in compiled graphs too."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hqsweep


class Block(nn.Module):
    def __init__(self, recomputed):
        super().__init__()
        self.recomputed, self.a, self.never = recomputed, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return checkpoint(self.a, x, use_reentrant=False) if self.recomputed else self.a(x)


@pytest.mark.slow
@pytest.mark.feature("H40")
def test_a_graph_with_activation_checkpointing_counts_its_calls():
    torch.compiler.reset()
    model = nn.Sequential(Block(True), Block(True), Block(False))
    conversion = hqsweep.convert(model, "mxfp8")
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(torch.ones(32, 32, requires_grad=True)).sum().backward()
    assert conversion.unused() == ["0.never", "1.never", "2.never"]
    torch.compiler.reset()
