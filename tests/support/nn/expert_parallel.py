"""Expert parallelism as a user writes it: experts spread over the ranks of a group, tokens exchanged by all_to_all."""

import torch
import torch.distributed as dist
from support.nn.experts import recipe_of
from torch import Tensor

from hqsweep.nn import GroupedLinear, GroupedLinearOptions

RANKS, EXPERTS, TOKENS, SIZES = 2, 4, 112, (64, 96)
LOCAL = EXPERTS // RANKS


def layer(recipe: dict, count: int) -> GroupedLinear:
    options = GroupedLinearOptions(single_grouped_weight=True)
    return GroupedLinear(count, *SIZES, name="experts", recipe=recipe_of(recipe), options=options).bfloat16()


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens, the expert of each, and the gradients of their outputs. Expert 2 gets none from rank 0."""
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(TOKENS, size, generator=generator).bfloat16() for size in SIZES)
    chosen = torch.randint(0, EXPERTS, (TOKENS,), generator=generator)
    return x, chosen if rank else chosen.where(chosen != 2, torch.tensor(1)), dy


def weight() -> Tensor:
    return torch.randn(EXPERTS, SIZES[1], SIZES[0], generator=torch.Generator().manual_seed(9)).bfloat16()


def exchange(rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
    received = rows.new_empty(sum(taken), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), taken, sent)
    return received


def run(rank: int, recipe: dict) -> dict[str, Tensor]:
    """One rank: its tokens' outputs and gradients, and the gradient of its experts' weights."""
    x, chosen, dy = inputs(rank)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=EXPERTS)
    theirs = torch.empty_like(counts)  # [ranks, my experts]: tokens that each rank has for each of mine
    dist.all_to_all_single(theirs, counts)
    sent, taken = counts.view(RANKS, LOCAL).sum(1).tolist(), theirs.view(RANKS, LOCAL).sum(1).tolist()
    expert = torch.arange(LOCAL).repeat(RANKS).repeat_interleave(theirs)
    own = expert.argsort(stable=True)  # by expert, and within each by rank
    module = layer(recipe, LOCAL)
    with torch.no_grad():
        module.weight.copy_(weight()[rank * LOCAL : (rank + 1) * LOCAL])
    local = exchange(x[order], sent, taken)[own].requires_grad_()
    y = module(local, theirs.view(RANKS, LOCAL).sum(0))
    y.backward(exchange(dy[order], sent, taken)[own])

    def back(rows: Tensor) -> Tensor:
        arrived = exchange(rows[own.argsort()], taken, sent)
        return arrived[order.argsort()]

    return {"y": back(y.detach()), "dx": back(local.grad), "dw": module.weight.grad}
