"""Targets of a loss over a vocabulary, and the cross entropy of whole logits.

Targets follow torch's cross_entropy: a row whose target is -100 has no loss, and the mean is over the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.ops.model.loss import IGNORED


def checked_targets(targets: Tensor, rows: int, vocabulary: int, device: torch.device, name: str) -> Tensor:
    """Return targets, int64 or uint8, as contiguous int64 [M] on a device. Each is an entry of the vocabulary or -100.

    UserError for another dtype, number or device, and on the CPU for other entries. The host does not wait for CUDA,
    where counted_rows() and torch's cross_entropy assert on the device.
    """
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
    """Return the number of checked targets with a loss, float32 [].

    On CUDA a target outside the vocabulary ends in a device-side assertion.
    """
    counted, ones = targets != IGNORED, torch.ones((), device=targets.device).expand(vocabulary)
    return ones.gather(0, targets.where(counted, 0)).where(counted, 0.0).sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [..., V] with targets [...], float32 [].

    It is torch's, in float32, NaN if all targets are -100. UserError as in checked_targets().
    """
    rows = logits.flatten(0, -2)
    return F.cross_entropy(rows.float(), checked_targets(targets, *rows.shape, rows.device, "cross_entropy"))
