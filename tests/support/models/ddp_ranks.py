"""One rank of a data-parallel training of a converted model: its rows of every batch, under DistributedDataParallel,
and sharded by FSDP2."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import DELAYED, RANDOM
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hqsweep
from hqsweep.models.conversion import Conversion
from hqsweep.nn import quantization
from hqsweep.recipe.roles import clean_name

RANKS, ROWS, WIDTH = 2, 64, 32
RECIPES = (RANDOM, DELAYED)
DTYPES = (None, torch.bfloat16)
"""Dtypes of what FSDP gathers."""


def model() -> nn.Module:
    """A model of plain torch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(48, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def rows(rank: int) -> Tensor:
    """int64 [ROWS]: what a rank has of the batch, no token of which the other one has."""
    half = WIDTH // RANKS
    return torch.randint(half * rank, half * (rank + 1), (ROWS,), generator=torch.Generator().manual_seed(rank))


def gradients(module: nn.Module, rank: int, step: int = 1) -> dict[str, Tensor]:
    """By the names of the plain model."""
    module.zero_grad()
    x = rows(rank)
    with quantization(seed=1, step=step):
        F.cross_entropy(module(x), x).backward()
    return {clean_name(name): _whole(p.grad) for name, p in module.named_parameters()}


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def sharded(dtype: torch.dtype | None) -> nn.Module:
    """The model, converted and then sharded, which computes in dtype; None: in that of its parameters."""
    module, mesh = model(), dist.init_device_mesh("cpu", (RANKS,))
    hqsweep.convert(module, RECIPES[0])
    options = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    for part in [*(part for part in module if list(part.parameters())), module]:
        fully_shard(part, mesh=mesh, **options)
    return module


def run(rank: int) -> dict[str, dict]:
    """What test_with_ddp.py compares."""
    seen = {}
    for recipe in RECIPES:
        plain = model()
        conversion = hqsweep.convert(plain, recipe)
        results = gradients(DistributedDataParallel(plain), rank)
        seen[recipe] = {"gradients": results, "states": conversion.state_dict(), "names": _names(conversion)}
    wrapped = DistributedDataParallel(model())
    conversion = hqsweep.convert(wrapped, RECIPES[0])
    seen["converted later"] = {"gradients": gradients(wrapped, rank), "names": _names(conversion)}
    for dtype in DTYPES:
        module = sharded(dtype)
        results = gradients(module, rank)
        seen[f"sharded {dtype}"] = {"gradients": results, "unused": hqsweep.conversion_of(module).unused()}
    return seen


def _names(conversion: Conversion) -> list[str]:
    return [module.name for module in conversion.modules]
