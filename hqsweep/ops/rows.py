"""Rows of a matrix to places of another one, by indices that only the device knows."""

import torch
from torch import Tensor

from hqsweep.ops.embedding import WORD, embed
from hqsweep.ops.library import has_kernels


def copy_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """Copy to each row of out [N, D] the one of rows [R, D] that index int64 [N] names; rows with a negative index stay
    as they are. Both are contiguous, of one dtype; nothing waits."""
    if 0 in (*rows.shape, *out.shape):
        return
    if rows.is_cuda and has_kernels("cuda") and _whole_words(rows) and _whole_words(out):
        embed(index.where(index >= 0, len(rows)), rows, out=out, ranks=2)  # as entries of another rank, which stay
    else:
        out.copy_(torch.where((index < 0)[:, None], out, rows.index_select(0, index.clamp(min=0))))


def _whole_words(x: Tensor) -> bool:
    return x.shape[1] * x.itemsize % WORD == 0 and x.data_ptr() % WORD == 0
