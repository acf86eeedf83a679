"""What each rank does in tests of exchanges of rounded gradients."""

import torch
import torch.distributed as dist

from hqsweep.formats import RngKey
from hqsweep.optim.partial_sums import rounded
from hqsweep.recipe.sections import Comm

SHAPES = ((48, 40), (70,), (5,))
KEY = RngKey(seed=3, slot="comm", step=7)


def partial_gradients(rank: int) -> dict[str, torch.Tensor]:
    """The gradients of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return {f"p{i}": torch.randn(shape, generator=generator) * 0.01 for i, shape in enumerate(SHAPES)}


def exchange(rank: int, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    """For each format the sums over the ranks of this process group, of rounded gradients."""
    sums = []
    for text in texts:
        format = Comm.parse(text, "comm").format
        own = {n: rounded(g, format, KEY.under(n).under(str(rank))) for n, g in partial_gradients(rank).items()}
        for gradient in own.values():
            dist.all_reduce(gradient)
        sums.append(own)
    return sums
