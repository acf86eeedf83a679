"""Rows of a table by tokens."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.errors import UserError
from hqsweep.nn.core.context import use_kernels
from hqsweep.ops.model.embedding import embed, embedding_gradient, takes


def check_tokens(shape: Sequence[int], axis: int, ranks: int, where: str = "") -> None:
    """Raise UserError for tokens [B, T] that ranks do not divide along an axis."""
    if shape[axis] % ranks:
        what = f"a sequence of {shape[1]} tokens" if axis else f"a batch of {shape[0]} sequences"
        raise UserError(f"{where}{what} does not divide by tp={ranks}")


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Return rows [..., D] of a table [V, D] for tokens int64 [...]. On CUDA, own kernels compute the table's
    gradient."""
    if not (use_kernels(table) and takes(table, tokens)):
        return F.embedding(tokens, table)
    return _Embedding.apply(tokens, table)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.entries = len(table)
        if torch.compiler.is_compiling():
            return F.embedding(tokens, table)
        return embed(tokens.reshape(-1), table).view(*tokens.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, embedding_gradient(gradient.flatten(0, -2), tokens.reshape(-1), ctx.entries)
