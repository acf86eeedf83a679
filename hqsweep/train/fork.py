"""The start of a fork: the whole state of a trunk in a model that is built in an arm's recipe.

Weights and their masters, moments, the count of updates and keys of random bits go on. Where trunk and arm hold a
weight in the same quantizer its bytes do, and else it is quantized from its master, as it would have been at that step.
The states of delayed scaling go on where the arm has the same slot, direction and length of history, and else begin
anew.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.linear import Linear
from hqsweep.nn.module import quantized_modules
from hqsweep.nn.parameter import link_states
from hqsweep.optim import FusedAdam
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.recipe.sections import slots
from hqsweep.train.keyed import keyed_seed


@torch.no_grad()
def start_from(model: nn.Module, optimizer: FusedAdam, state: Mapping[str, Any]) -> None:
    """Give model and optimizer the state of a Trainer of the same model in any recipe."""
    optimizer.load_state_dict(state["optimizer"])
    weights, named = dict(state["model"]), dict(model.named_parameters(remove_duplicate=False))
    anew = {
        name: (p, p.metadata.key)
        for name, p in named.items()
        if isinstance(p, HybridQuantizedTensor) and getattr(weights[name], "quantizer", None) != p.quantizer
    }
    model.load_state_dict(weights | {name: optimizer.master_param(p) for name, (p, _) in anew.items()})
    for module in quantized_modules(model):
        module.states.keep(slots(module.quantizers))
        if isinstance(module, Linear | GroupedLinear):
            link_states([module.weight] if isinstance(module, Linear) else module.weights, module.states)
    for p, key in anew.values():
        p.quantize_(optimizer.master_param(p), key=key and replace(key, step=key.step + state["step"]))


@torch.no_grad()
def perturb(model: nn.Module, optimizer: FusedAdam, noise: float, key: tuple[int, int]) -> None:
    """Multiply every weight (its master, where it has one) by 1 + noise * eps, eps ~ N(0, 1) keyed by (seed, step)."""
    drawn = torch.Generator().manual_seed(keyed_seed(*key))
    for p in model.parameters():
        master = optimizer.master_param(p)
        master.mul_(1 + noise * torch.randn(p.shape, generator=drawn).to(master.device))
        if isinstance(p, HybridQuantizedTensor):
            p.quantize_(master, key=p.metadata.key)
        elif master is not p:
            p.copy_(master)
