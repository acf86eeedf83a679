"""The loss over a vocabulary that ranks share out: hqsweep::loss_parts and hqsweep::shared_cross_entropy_.

A rank has the logits of the entries [first, first + V) of the whole vocabulary. Of each row it tells the others four
numbers, its part; with those of all ranks it knows the loss, and the gradient of its own logits. On CUDA each of the
two is one pass of a kernel; torch's operators are the reference, and compute what the kernels do not take. Where ranks
write to each other's memory, one kernel does both, and reads the logits once (joint_cross_entropy_).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.addresses import described
from hqsweep.ops.library import extension, has_kernels, on_its_device, operator, where
from hqsweep.ops.model.loss import IGNORED, check_loss, takes

NUMBERS = 4
"""The numbers of a part: the largest logit, sum(exp(x - largest)), the target's logit if it is here, and whether."""


@operator(
    "loss_parts(Tensor logits, Tensor targets, int first) -> Tensor",
    fake=lambda logits, targets, first: logits.new_empty((logits.shape[0], NUMBERS), dtype=torch.float32),
    devices=("CUDA",),
)
def _loss_parts(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """loss_parts by the kernel; ValueError for what ops.loss.check_loss refuses."""
    check_loss(logits, targets)
    rows, vocabulary = logits.shape
    parts = logits.new_empty((rows, NUMBERS), dtype=torch.float32)
    call = (logits.data_ptr(), targets.data_ptr(), parts.data_ptr(), rows, vocabulary, first)
    extension().loss_parts_cuda(*call, *where(logits))
    return parts


def loss_parts(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Logits [M, V] of the entries [first, first + V), targets int64 [M] of the whole vocabulary -> float32 [M, 4]:
    max(x), sum(exp(x - max(x))), the logit of the target or 0, and 1 where the target is one of these entries, else 0.

    A NaN is in the sum, and never the largest; rows of -inf alone have a sum of 0.
    """
    if logits.is_cuda and has_kernels("cuda") and takes(logits):
        return _loss_parts(logits, targets, first)
    x, own = logits.float(), targets - first
    largest = x.masked_fill(x.isnan(), -torch.inf).amax(1)
    total = (x - _base(largest)[:, None]).exp().sum(1)
    has = (own >= 0) & (own < x.shape[1])
    rows = torch.arange(len(x), device=x.device)
    of_target = x[rows, own.where(has, 0)].where(has, 0.0)
    return torch.stack([largest, total, of_target, has.float()], dim=1)


@operator(
    "shared_cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor parts, int first, Tensor scale, bool gradient)"
    " -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32),
    devices=("CUDA",),
)
def _shared(logits: Tensor, targets: Tensor, parts: Tensor, first: int, scale: Tensor, gradient: bool) -> Tensor:
    """shared_cross_entropy_ by the kernel; parts contiguous. ValueError for others, and for what check_loss refuses."""
    check_loss(logits, targets, scale)
    rows, vocabulary = logits.shape
    shaped = parts.dim() == 3 and parts.shape[1:] == (rows, NUMBERS) and len(parts) > 0
    if parts.dtype != torch.float32 or not shaped or not parts.is_contiguous() or parts.device != logits.device:
        wanted = f"float32 [ranks, {rows}, {NUMBERS}], contiguous, on {logits.device}"
        raise ValueError(f"parts are {described(parts)}; they are {wanted}")
    losses = logits.new_empty(rows, dtype=torch.float32)
    call = (logits.data_ptr(), targets.data_ptr(), parts.data_ptr(), losses.data_ptr(), rows, vocabulary, first)
    extension().shared_cross_entropy_cuda(*call, len(parts), scale.data_ptr(), gradient, *where(logits))
    return losses


def shared_cross_entropy_(
    logits: Tensor, targets: Tensor, parts: Tensor, first: int, scale: Tensor, *, gradient: bool
) -> Tensor:
    """ops.loss.cross_entropy_ of a rank's logits [M, V]: the losses, float32 [M], of the whole vocabulary, by the parts
    [W, M, 4] that all W ranks have of its rows. Sums over ranks are in their order, so all have the same losses.

    gradient: each row of the logits is overwritten by (softmax(x)_v - [v = target]) * scale of the whole softmax. A row
    whose target is IGNORED has a loss and a gradient of 0; another target that no rank has gives NaN for both.
    """
    if logits.is_cuda and has_kernels("cuda") and takes(logits):
        return _shared(logits, targets, parts.contiguous(), first, scale, gradient)
    largest = parts[..., 0].amax(0)
    total = torch.zeros_like(largest)
    for part in parts:
        same = part[:, 0] == largest
        total += part[:, 1].where(same, part[:, 1] * (part[:, 0] - largest).exp())
    of_target = torch.full_like(largest, torch.nan)
    for part in parts:
        of_target = part[:, 2].where(part[:, 3] != 0, of_target)
    counted = targets != IGNORED
    if gradient:
        softmax = (logits.float() - _base(largest)[:, None]).exp_().div_(total[:, None])
        own = targets - first
        has = (own >= 0) & (own < logits.shape[1])
        rows = torch.arange(len(own), device=own.device)
        own = own.where(has, 0)
        softmax[rows, own] -= has.float()  # torch.use_deterministic_algorithms lets it pass
        scale = scale.where(~of_target.isnan(), torch.nan).where(counted, 0.0)
        logits.copy_(softmax.mul_(scale[:, None]))
    return (total.log() + (largest - of_target)).where(counted, 0.0)


MOST_RANKS = 16
"""Ranks of a joint cross entropy (csrc/loss.h)."""


class Boxes(NamedTuple):
    """Memory of the GPUs of all ranks in which kernels tell each other parts, as csrc/loss.h has it (loss_mailbox)."""

    address: int
    """The address, on this rank's device, of the addresses of the ranks' boxes."""
    state: Tensor
    """uint32 [3]."""
    rows: int
    """The rows that a box has room for."""
    ranks: int
    rank: int


@on_its_device
def joint_cross_entropy_(logits: Tensor, targets: Tensor, boxes: Boxes, scale: Tensor) -> Tensor | None:
    """shared_cross_entropy_ with the gradient, to the bit, by a kernel on every rank's GPU that tells the others the
    parts of its rows; rank r has the entries [r * V, (r + 1) * V). None, and nothing is done, where the kernel does not
    take the logits."""
    if not (has_kernels("cuda") and takes(logits)):
        return None
    check_loss(logits, targets, scale)
    rows, vocabulary = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    told = (boxes.address, boxes.state.data_ptr(), rows, vocabulary)
    call = (logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), *told)
    options = (boxes.rank * vocabulary, boxes.rows, boxes.ranks, boxes.rank, scale.data_ptr())
    return losses if extension().joint_cross_entropy_cuda(*call, *options, *where(logits)) else None


def _base(largest: Tensor) -> Tensor:
    """What is subtracted from logits: 0 where all of them are -inf, for -inf - -inf is NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)
