"""Quantization in the pass that computes the matrix: of an activation, its gradient, or a norm. On CUDA the matrix is
never stored.

It needs formats with all scales in blocks and without random bits: such formats need nothing from the matrix in
advance. The bytes equal quantize() of activation(), activation_backward() or norm(). Without a fused kernel, the
operators run these.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.elementwise import INPUTS, activation, activation_backward, check_gradient, check_input
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.norm import check_normed, norm, ready
from hqsweep.ops.quantize.kernels import DTYPES, kernel_of
from hqsweep.ops.quantize.nonfinite import NOBODY, current
from hqsweep.ops.quantize.operators import NO_STREAM, Matrices, Wanted, allocations, direction, outputs_of
from hqsweep.ops.quantize.request import Request, check_shape


class Formats(NamedTuple):
    """Format texts of both directions, "" for an unwanted one, and what the kernels make of them.

    dequantized: columns are made from decoded rows. exact: whether rows, and columns, are exact operands. seen: the
    slot number (ops.quantize.nonfinite).
    """

    rowwise: str
    columnwise: str
    dequantized: bool
    exact: Sequence[bool]
    seen: int = NOBODY


def formats_of(request: Request) -> Formats:
    exact = [request.row_exact, request.column_exact]
    return Formats(request.row_text, request.column_text, request.dequantized, exact, current())


def _is_of_blocks(text: str) -> bool:
    spec = kernel_of(text)
    return spec.amax_name is None and not spec.stochastic


def takes_formats(request: Request) -> bool:
    """Return whether a matrix can be quantized in these formats while it is computed.

    All of them need a kernel, all scales in blocks, and no random bits.
    """
    texts = [text for text in (request.row_text, request.column_text) if text]
    return bool(texts) and request.kernels and all(map(_is_of_blocks, texts))


def fake_outputs(x: Tensor, shape: tuple[int, int], formats: Formats) -> list[Tensor]:
    """Return the outputs of hqsweep::quantize for a matrix of this shape on x's device, for traced graphs."""
    matrix, shapes = Matrices(*shape), []
    for text, across, exact in zip(formats[:2], (False, True), formats.exact, strict=True):
        if text:
            shapes += allocations(matrix, Wanted(text, across, exact, False), True)
    return [x.new_empty(size, dtype=dtype) for size, dtype in shapes]


class Directions:
    """Kernel arguments for these formats and a matrix [rows, cols] on x's device, and the `tensors` that the kernel
    fills.

    ValueError for formats that draw random bits or have a global amax.
    """

    def __init__(self, x: Tensor, shape: tuple[int, int], formats: Formats) -> None:
        for text in filter(None, formats[:2]):
            if not _is_of_blocks(text):
                raise ValueError(f"{text} draws random bits or has a global amax; quantize() takes it")
        if len(formats.exact) != 2:
            raise ValueError(f"exact is {formats.exact}; it takes one for rows and one for columns")
        row_exact, column_exact = formats.exact
        of_rows, of_columns = outputs_of(
            (*shape, None, None),
            (formats.rowwise, False, row_exact, False) if formats.rowwise else None,
            (formats.columnwise, True, column_exact, False) if formats.columnwise else None,
            True,
        )
        self.tensors: list[Tensor] = []
        self.scratch: list[Tensor] = []
        fields = self.tensors, self.scratch, NO_STREAM, None, formats.seen
        row = direction(of_rows, x, *fields) if formats.rowwise else None
        column = direction(of_columns, x, *fields) if formats.columnwise else None
        self.arguments = (row, column, formats.dequantized)

    def quantize(self, x: Tensor) -> None:
        """Quantize a finished matrix, for cases in which no kernel computes and quantizes it in one pass."""
        call = (x.data_ptr(), DTYPES[x.dtype], *x.shape, *x.stride(), *self.arguments)
        extension().quantize_cuda(*call, *where(x))


def shape_of(z: Tensor, dh: Tensor | None, kind: str) -> tuple[int, int]:
    """Return the shape of the quantized matrix."""
    return (z.shape[0], z.shape[1] // INPUTS[kind]) if dh is None else (z.shape[0], z.shape[1])


def _fake_activated(z, dh, kind, *formats):
    return fake_outputs(z, shape_of(z, dh, kind), Formats(*formats))


@operator(
    "quantize_activated(Tensor z, Tensor? dh, str kind, str rowwise, str columnwise, bool dequantized, "
    "bool[2] exact, int seen=0) -> Tensor[]",
    fake=_fake_activated,
    devices=("CUDA",),
)
def _activated(z, dh, kind, *formats):
    """Return the outputs of hqsweep::quantize for h, or with dh for the gradient of z. formats: the fields of Formats.

    ValueError for other formats, and as activation() raises it.
    """
    check_input(z, kind)
    if dh is not None:
        check_gradient(dh, z, kind)
    directions = Directions(z, shape_of(z, dh, kind), Formats(*formats))
    of = (kind, z.shape[0], z.shape[1] // INPUTS[kind], z.data_ptr(), 0 if dh is None else dh.data_ptr())
    if not extension().quantize_activated_cuda(*of, *directions.arguments, *where(z)):
        (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
        directions.quantize(x)
    return directions.tensors


def quantize_activated(request: Request, z: Tensor, dh: Tensor | None, kind: str) -> list[Tensor]:
    """Return the quantize operator's outputs for h = activation(z), or with dh for the gradient of z (see
    quantized_of).

    It needs formats that takes_formats() accepts, and a z that activation() takes. UserError for a shape that a format
    cannot hold.
    """
    check_shape(request, shape_of(z, dh, kind))
    return _activated(z, dh, kind, *formats_of(request))


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


def takes_normed(x: Tensor) -> bool:
    """Return whether the norm of a stream like x is quantized as it is computed. norm() must take x.

    x must be bfloat16, so that the sum needs no more memory than the norm, and have whole blocks of 32.
    """
    return x.dtype is torch.bfloat16 and x.numel() > 0 and x.shape[-1] % 32 == 0


def _fake_normed(total, gain, bias, statistics, epsilon, *formats):
    return fake_outputs(total, tuple(total.shape), Formats(*formats))


@operator(
    "quantize_normed(Tensor total, Tensor gain, Tensor? bias, Tensor statistics, float epsilon, str rowwise, "
    "str columnwise, bool dequantized, bool[2] exact, int seen=0) -> Tensor[]",
    fake=_fake_normed,
    devices=("CUDA",),
)
def _normed(total, gain, bias, statistics, epsilon, *formats):
    """Return the outputs of hqsweep::quantize for the norm. formats: the fields of Formats.

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
    """Return the quantize operator's outputs for the norm. The formats must pass takes_formats().

    UserError for a shape that a format cannot hold.
    """
    check_shape(request, of.total.shape)
    return _normed(*of, *formats_of(request))
