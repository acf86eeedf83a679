"""What tests of losses over a vocabulary are given."""

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
INFINITY = float("inf")


def inputs(rows, vocabulary, device, spread=3.0):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = spread * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return logits.bfloat16().to(device), targets.to(device)


def one(value, like):
    """One float32 on the device of a tensor."""
    return torch.full((), value, device=like.device)
