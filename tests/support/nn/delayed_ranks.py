"""One rank of a data-parallel training in fp8_delayed: its rows of every batch, under DistributedDataParallel."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, Linear, quantization
from hqsweep.recipe import LinearQuantizers, Recipe

RANKS, STEPS, ROWS = 2, 4, 64
SHARED = {"input": "fp8_delayed+history3", "weight": "fp8_delayed", "grad_output": "fp8_delayed+e5m2"}
LOCAL = "fp8_delayed+local_amax"


class Model(nn.Module):
    """A linear and two experts."""

    def __init__(self, recipe: dict | str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = Linear(64, 64, name="l", recipe=LinearQuantizers.parse(recipe, "test"))
        self.experts = GroupedLinear(2, 64, 32, name="e", recipe=Recipe.from_config({"linear": recipe}))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.linear(x), [len(x) // 2] * 2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Rows and the gradients of their outputs; the second half is much larger."""
    sizes = torch.linspace(0.1, 30.0, ROWS)[:, None] * step
    return draw("normal", ROWS, 64, step).float() * sizes, draw("normal", ROWS, 32, -step).float() * sizes


def train(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """One step, of a rank or of one process that has the whole batch."""
    x, dy = batch(step) if rank is None else (tensor.chunk(RANKS)[rank] for tensor in batch(step))
    with quantization(step=step):
        y = model(x)
        y.backward(dy.to(y.dtype))
    return y.detach()


def states(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "states." in name}


def run(rank: int) -> dict[str, Any]:
    """What test_delayed_ranks.py compares."""
    model, seen = Model(SHARED), {}
    parallel = DistributedDataParallel(model)
    for step in range(1, STEPS + 1):
        seen[f"y{step}"] = train(parallel, step, rank)
        seen[f"states{step}"] = states(model)
        if step == 2:
            saved = copy.deepcopy(model.state_dict())
    resumed = Model(SHARED)
    resumed.load_state_dict(saved)
    parallel = DistributedDataParallel(resumed)
    seen["resumed"] = [train(parallel, step, rank) for step in (3, 4)]
    alone = Model(SHARED)
    group = [dist.new_group([r]) for r in range(RANKS)][rank]
    with quantization(step=1, amax_group=group):
        alone(batch(1)[0].chunk(RANKS)[rank])
    seen["of a group"] = states(alone)
    for name, options in {"local": {"broadcast_buffers": False}, "overwritten": {}}.items():
        model = Model(LOCAL)
        parallel = DistributedDataParallel(model, **options)
        try:
            for step in (1, 2):
                train(parallel, step, rank)
            seen[name] = states(model)
        except UserError as error:
            seen[name] = str(error)
    return seen
