"""The cross entropy of the logits of a vocabulary, whole, or over the ranks of a group.

Rank r of W has the entries [r * v, (r + 1) * v) of W * v. Nothing of the size of all logits goes over the wire: of a
row only its largest logit, the sum of its exponentials, and the logit of its target (Shoeybi et al., arXiv 1909.08053).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.dist.tokens import sum_whole

IGNORED = -100
"""Target of a row that has no loss, as torch's cross_entropy has it."""


def split_cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """The mean cross entropy of logits [M, v] of each rank with targets int64 [M] of the whole vocabulary, float32 [],
    equal on all ranks: log(sum_v exp(x_v - max)) + max - x_target in float32, sums added in the order of ranks."""
    return _SplitCrossEntropy.apply(logits, targets, group)


class _SplitCrossEntropy(torch.autograd.Function):
    """Saves the softmax of this rank's logits in float32."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        x, first = logits.float(), group.rank() * logits.shape[1]
        largest = x.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        rows, own = torch.arange(len(x), device=x.device), targets - first
        here = (own >= 0) & (own < x.shape[1])
        own = own.where(here, 0)
        of_target = x[rows, own].where(here, 0.0)
        softmax = (x - largest[:, None]).exp_()
        total, of_target = sum_whole(torch.stack([softmax.sum(dim=1), of_target]), group)
        softmax /= total[:, None]
        counted = targets != IGNORED
        losses = (total.log() + largest - of_target).where(counted, 0.0)
        count = counted.sum()
        ctx.save_for_backward(softmax, own, here, counted, count)
        ctx.dtype = logits.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, here, counted, count = ctx.saved_tensors
        gradients = softmax.clone()
        rows = torch.arange(len(own), device=own.device)
        gradients[rows, own] -= here.float()
        return gradients.mul_((counted * (gradient / count))[:, None]).to(ctx.dtype), None, None


def cross_entropy(logits: Tensor, targets: Tensor, group: Any = None) -> Tensor:
    """The mean cross entropy of logits [..., V] with targets int64 [...], float32 []: torch's, in float32. group: the
    ranks each of which has V of the vocabulary's logits, in their order (nn.vocabulary)."""
    rows, targets = logits.flatten(0, -2), targets.reshape(-1)
    if group is not None:
        return split_cross_entropy(rows, targets, group)
    return F.cross_entropy(rows.float(), targets)
