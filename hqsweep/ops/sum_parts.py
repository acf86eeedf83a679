"""The sum over ranks of their partial results for the same tokens: hqsweep::sum_parts.

A rank holds its own summand inside a matrix of all tokens; the other summands were received. On CUDA one pass reads
each summand once. torch's operators are the reference.
"""

import torch
from torch import Tensor

from hqsweep.ops.library import described, extension, has_kernels, operator, where
from hqsweep.ops.quantize.kernels import DTYPES

WORD = 16
"""Bytes that the kernel loads at once."""


def _fake(parts: Tensor, received: Tensor, rank: int) -> Tensor:
    return parts.new_empty((parts.shape[0], parts.shape[2]))


@operator("sum_parts(Tensor parts, Tensor received, int rank) -> Tensor", fake=_fake, devices=("CUDA",))
def _sum_parts(parts: Tensor, received: Tensor, rank: int) -> Tensor:
    """Run sum_parts by the kernel; ValueError for inputs that `takes` refuses."""
    if not takes(parts, received) or not 0 <= rank < parts.shape[1]:
        wanted = "[lead, W, n] and [W - 1, lead, n] of float32, bfloat16 or float16, contiguous, n in words of 16 bytes"
        got = f"parts are {described(parts)}, received {described(received)}, rank {rank}"
        raise ValueError(f"{got}; it takes {wanted}")
    total = parts.new_empty(parts.shape[0], parts.shape[2])
    _add(parts, received, rank, total)
    return total


def _add(parts: Tensor, received: Tensor, rank: int, total: Tensor) -> None:
    lead, ranks, count = parts.shape
    call = (parts.data_ptr(), received.data_ptr(), total.data_ptr(), DTYPES[parts.dtype], lead, ranks, count, rank)
    extension().sum_parts_cuda(*call, *where(parts))


def takes(parts: Tensor, received: Tensor) -> bool:
    """Return whether the CUDA kernel takes these inputs."""
    lead, ranks, count = parts.shape
    same = parts.dtype == received.dtype and parts.device == received.device
    shaped = received.shape == (ranks - 1, lead, count) and parts.is_contiguous() and received.is_contiguous()
    whole = all(x.data_ptr() % WORD == 0 for x in (parts, received)) and count * parts.itemsize % WORD == 0
    return same and shaped and whole and parts.dtype in DTYPES


def sum_parts(parts: Tensor, received: Tensor, rank: int, out: Tensor | None = None) -> Tensor:
    """Return [lead, n]: all summands added in float32 in rank order, and rounded once to their dtype.

    parts [lead, W, n]: parts[:, rank] is this rank's summand. received [W - 1, lead, n]: the other ranks' summands, in
    rank order. out: contiguous, with the sum's shape and dtype; the sum is written to it.
    """
    compiling = torch.compiler.is_compiling()
    if parts.is_cuda and not compiling and has_kernels("cuda") and takes(parts, received):
        if out is None:
            return _sum_parts(parts, received, rank)
        if out.data_ptr() % WORD == 0:
            _add(parts, received, rank, out)
            return out
    summands = [*received[:rank], parts[:, rank], *received[rank:]]
    total = summands[0].to(torch.float32, copy=True)
    for summand in summands[1:]:
        total += summand
    total = total.to(parts.dtype)
    return total if out is None else out.copy_(total)
