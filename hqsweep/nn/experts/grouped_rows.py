"""Pad experts on a device: rows go to their places in a larger matrix of zeros, and come back.

Places differ from each other, so nothing is ever added up, neither here nor in backward.
"""

import torch
from torch import Tensor

from hqsweep.nn.core.products import returned


def place_rows(x: Tensor, places: Tensor, count: int) -> Tensor:
    """Return [count, D] with row places[i] equal to x[i], all others zero. x: [M, D]; places: int64 [M], all
    different."""
    return _Place.apply(x, places, count)


def take_rows(y: Tensor, places: Tensor) -> Tensor:
    """Return y[places] [M, D] of y [count, D]; the gradient of other rows is zero. places: as in place_rows."""
    return _Take.apply(y, places)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return returned(x.new_zeros(count, x.shape[1]).index_copy_(0, places, x))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return take_rows(dy, *ctx.saved_tensors), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(y)
        return y.index_select(0, places)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        return place_rows(dx, *ctx.saved_tensors, ctx.count), None
