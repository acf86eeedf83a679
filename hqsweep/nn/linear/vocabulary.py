"""The cross entropy of the logits of a vocabulary, whole, or over the ranks of a group.

Rank r of W has the entries [r * v, (r + 1) * v) of W * v. Nothing of the size of all logits goes over the wire: of a
row only its largest logit, the sum of its exponentials, and the logit of its target (Shoeybi et al., arXiv 1909.08053).

Targets follow torch's cross_entropy: a row whose target is -100 has no loss, and the mean is over the others.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.ops.model.loss import IGNORED
from hqsweep.parallel.wire.tokens import sum_whole


def checked_targets(targets: Tensor, rows: int, vocabulary: int, device: torch.device, name: str) -> Tensor:
    """The targets, int64 or uint8, of so many rows on a device, each an entry of the vocabulary or -100: int64 [M],
    contiguous. UserError for another dtype, number or device, and on the CPU for other entries; nothing waits for
    CUDA, where counted_rows() and torch's cross_entropy assert on the device that there are none."""
    if targets.dtype not in (torch.int64, torch.uint8):
        raise UserError(f"{name}: targets are {targets.dtype} {list(targets.shape)}; they take int64 entries")
    if targets.numel() != rows or targets.device.type != device.type:
        came = f"{targets.numel()} targets {list(targets.shape)} on {targets.device} for {rows} rows on {device}"
        raise UserError(f"{name}: got {came}; every row takes one, on its device, and {IGNORED} for no loss")
    indices = targets.detach().reshape(-1).to(torch.int64).contiguous()
    if indices.is_cpu and not torch.compiler.is_compiling():
        wrong = indices[(indices != IGNORED) & ((indices < 0) | (indices >= vocabulary))]
        if len(wrong):
            raise UserError(
                f"{name}: target {wrong[0].item()} is no entry of a vocabulary of {vocabulary}; targets are 0 to"
                f" {vocabulary - 1}, or {IGNORED} for no loss"
            )
    return indices


def counted_rows(targets: Tensor, vocabulary: int) -> Tensor:
    """The number of rows of checked targets that have a loss, float32 []. On CUDA a target that is no entry of the
    vocabulary ends in a device-side assertion."""
    counted, ones = targets != IGNORED, torch.ones((), device=targets.device).expand(vocabulary)
    return ones.gather(0, targets.where(counted, 0)).where(counted, 0.0).sum()


def split_cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """The mean cross entropy of logits [M, v] of each rank with checked targets int64 [M] of the whole vocabulary,
    float32 [], equal on all ranks: log(sum_v exp(x_v - max)) + max - x_target in float32, sums added in the order of
    ranks."""
    return _SplitCrossEntropy.apply(logits, targets, counted_rows(targets, group.size() * logits.shape[1]), group)


class _SplitCrossEntropy(torch.autograd.Function):
    """Saves the softmax of this rank's logits in float32."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, count: Tensor, group: ProcessGroup) -> Tensor:
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
        ctx.save_for_backward(softmax, own, here, counted, count)
        ctx.dtype = logits.dtype
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, own, here, counted, count = ctx.saved_tensors
        gradients = softmax.clone()
        rows = torch.arange(len(own), device=own.device)
        gradients[rows, own] -= here.float()
        gradients.mul_((gradient / count).where(counted, 0.0)[:, None])
        return gradients.to(ctx.dtype), None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, group: Any = None) -> Tensor:
    """The mean cross entropy of logits [..., V] with targets [...], float32 []: torch's, in float32, also where some
    targets, or all, are -100. group: the ranks each of which has V of the vocabulary's logits, in their order
    (nn.vocabulary). UserError as checked_targets() raises it."""
    rows, ranks = logits.flatten(0, -2), 1 if group is None else group.size()
    targets = checked_targets(targets, len(rows), ranks * rows.shape[1], rows.device, "cross_entropy")
    if group is not None:
        return split_cross_entropy(rows, targets, group)
    return F.cross_entropy(rows.float(), targets)
