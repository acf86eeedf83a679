"""Quantize the output of a norm in the pass that computes it: on CUDA the matrix is never stored.

The bytes equal quantize() of norm(). Without a fused kernel, the operator runs these two.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.model.norm import check_normed, norm, ready
from hqsweep.ops.quantize.blocks import Directions, Formats, fake_outputs, formats_of
from hqsweep.ops.quantize.request import Request, check_shape


class Normed(NamedTuple):
    """The tensors from which the output of a norm is computed."""

    total: Tensor
    """bfloat16 [rows, D]."""
    gain: Tensor
    """float32 [D]."""
    bias: Tensor | None
    """float32 [D] for LayerNorm; None for RMSNorm."""
    statistics: Tensor
    """float32 [1, rows], for LayerNorm [2, rows], from norm_statistics()."""
    epsilon: float


def takes(x: Tensor) -> bool:
    """Return whether the norm of a stream like x is quantized as it is computed. norm() must take x.

    x must be bfloat16, so that the sum needs no more memory than the norm, and have whole blocks of 32.
    """
    return x.dtype is torch.bfloat16 and x.numel() > 0 and x.shape[-1] % 32 == 0


def _fake(total, gain, bias, statistics, epsilon, *formats):
    return fake_outputs(total, tuple(total.shape), Formats(*formats))


@operator(
    "quantize_normed(Tensor total, Tensor gain, Tensor? bias, Tensor statistics, float epsilon, str rowwise, "
    "str columnwise, bool dequantized, bool[2] exact, int seen=0) -> Tensor[]",
    fake=_fake,
    devices=("CUDA",),
)
def _by_operator(total, gain, bias, statistics, epsilon, *formats):
    """Return the outputs of hqsweep::quantize for the norm. formats: the fields of blocks.Formats.

    ValueError for other formats, and as norm() raises it.
    """
    check_normed(total, gain, bias, statistics)
    directions = Directions(total, tuple(total.shape), Formats(*formats))
    total, gain, statistics = ready(total), ready(gain), ready(statistics)
    bias = None if bias is None else ready(bias)
    of = (total.data_ptr(), gain.data_ptr(), 0 if bias is None else bias.data_ptr(), statistics.data_ptr())
    if not extension().quantize_normed_cuda(*of, *total.shape, *directions.arguments, *where(total)):
        directions.quantize(norm(total, None, gain, bias, epsilon, total.dtype)[0])
    return directions.tensors


def quantize_normed(request: Request, of: Normed) -> list[Tensor]:
    """Return the quantize operator's outputs for the norm. The formats must pass blocks.takes_formats().

    UserError for a shape that a format cannot hold.
    """
    check_shape(request, of.total.shape)
    return _by_operator(*of, *formats_of(request))
