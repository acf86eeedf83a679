"""Activations that are computed again in backward: torch.utils.checkpoint and Hugging Face's gradient checkpointing."""

from functools import partial

import pytest
import torch
from cases import DELAYED, RANDOM
from support.models.llamas import differences, llama, results
from torch import nn
from torch.utils.checkpoint import checkpoint

import hqsweep
from hqsweep.nn import quantization


def stepped(model, steps=(1, 2)):
    """What the last step gives."""
    for step in steps:
        with quantization(seed=1, step=step):
            outputs = results(model, step)
    return outputs


@pytest.mark.parametrize("recipe", [RANDOM, DELAYED])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing_changes_no_bit(recipe, reentrant):
    """None: as Hugging Face chooses. Histories of delayed scaling take each step once."""
    plain, again = (llama() for _ in range(2))
    conversions = [hqsweep.convert(model, recipe) for model in (plain, again)]
    again.gradient_checkpointing_enable(*([] if reentrant is None else [{"use_reentrant": reentrant}]))
    assert not differences(stepped(plain.train()), stepped(again.train()))
    states = [conversion.state_dict() for conversion in conversions]
    assert (recipe == DELAYED) == bool(states[0])
    if states[0]:
        assert not differences(*states)


class Checkpointed(nn.Module):
    """A block whose inner activations are computed again."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_changes_no_bit(reentrant):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    plain, again = nn.Sequential(*blocks), nn.Sequential(*map(partial(Checkpointed, reentrant=reentrant), blocks))
    hqsweep.convert(plain, "nvfp4+sr")
    x = torch.randn(32, 32)
    runs = []
    for model in (plain, again):
        model.zero_grad()
        with quantization(seed=1, step=3):
            model(x.requires_grad_()).square().sum().backward()
        runs.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    assert not differences(*runs)
