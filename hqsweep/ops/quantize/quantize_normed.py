"""Quantize the output of a norm from the sum and the statistics of its rows: on CUDA, without the matrix between.

The bytes are those of quantize() of norm(). The operator runs these two where no kernel does both at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.model.norm import check_normed, norm, ready
from hqsweep.ops.quantize.blocks import Directions, Formats, fake_outputs, formats_of
from hqsweep.ops.quantize.request import Request, check_shape


class Normed(NamedTuple):
    """What the output of a norm is computed of."""

    total: Tensor
    """bfloat16 [rows, D]."""
    gain: Tensor
    """float32 [D]."""
    bias: Tensor | None
    """float32 [D] for LayerNorm; None for RMSNorm."""
    statistics: Tensor
    """float32 [1, rows], for LayerNorm [2, rows], as norm_statistics() gives them."""
    epsilon: float


def takes(x: Tensor) -> bool:
    """Whether the norm of a stream like x, which norm() takes, is quantized as it is computed: x is bfloat16 then, so
    that the sum takes no more memory than its norm, and consists of whole blocks of 32."""
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
    """The outputs of hqsweep::quantize for the norm. ValueError as norm() raises it, and for formats that are not those
    of ops.blocks."""
    check_normed(total, gain, bias, statistics)
    directions = Directions(total, tuple(total.shape), Formats(*formats))
    total, gain, statistics = ready(total), ready(gain), ready(statistics)
    bias = None if bias is None else ready(bias)
    of = (total.data_ptr(), gain.data_ptr(), 0 if bias is None else bias.data_ptr(), statistics.data_ptr())
    if not extension().quantize_normed_cuda(*of, *total.shape, *directions.arguments, *where(total)):
        directions.quantize(norm(total, None, gain, bias, epsilon, total.dtype)[0])
    return directions.tensors


def quantize_normed(request: Request, of: Normed) -> list[Tensor]:
    """The outputs of the operator quantize for the norm, in formats that blocks.takes_formats(). UserError for a shape
    that a format cannot hold."""
    check_shape(request, of.total.shape)
    return _by_operator(*of, *formats_of(request))
