"""PartialSums: gradients as sums of the ranks' partial gradients, each rounded to the format of recipe.comm."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.formats import Format, RngKey
from hqsweep.ops.quantize.dequantize import dequantize
from hqsweep.ops.quantize.quantize import encode
from hqsweep.recipe.sections import COMM_WIDTH, Comm


class PartialSums:
    """The gradients of one step. take() ends a rank's backward, and finish() gives parameters the sums.

    parameters: (name, parameter) pairs. key: of the step, for formats with random bits; the slot gets the parameter's
    name and the rank. Sums are float32 and are rounded to a gradient's dtype at the end.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], comm: Comm, key: RngKey) -> None:
        self.parameters, self.comm, self.key = list(parameters), comm, key
        self._sums: dict[Tensor, Tensor] = {}
        self._grads: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def take(self, rank: int) -> None:
        """Add the rank's rounded gradients to the sums. Leaves parameters without gradients."""
        for name, p in self.parameters:
            if p.grad is None:
                continue
            own = rounded(p.grad, self.comm.format, self.key.under(name).under(str(rank)))
            if p in self._sums:
                self._sums[p].add_(own)
            else:
                self._sums[p], self._grads[p] = own, p.grad
            p.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Give every parameter the sum of its gradients."""
        for p, total in self._sums.items():
            self._grads[p].copy_(total)
            p.grad = self._grads[p]


def rounded(gradient: Tensor, format: Format, key: RngKey) -> Tensor:
    """float32, of the gradient's shape: its values in the format, in memory order in rows of COMM_WIDTH elements.

    The last row is filled with zeros. A format with a scale for the tensor has one for the whole gradient.
    """
    flat = gradient.detach().to(torch.float32).reshape(-1)
    rows = F.pad(flat, (0, -len(flat) % COMM_WIDTH)).view(-1, COMM_WIDTH)
    codes = encode(rows, format, key=key if format.stochastic else None)
    values = dequantize(codes, format, tuple(rows.shape))
    return values.view(-1)[: len(flat)].view(gradient.shape)
