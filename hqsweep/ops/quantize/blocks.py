"""Quantization in the kernel that computes the matrix.

It needs formats with all scales in blocks and without random bits: such formats need nothing from the matrix in
advance.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from hqsweep.ops.library import extension, where
from hqsweep.ops.quantize.kernels import DTYPES, kernel_of
from hqsweep.ops.quantize.nonfinite import NOBODY, current
from hqsweep.ops.quantize.outputs import NO_STREAM, Matrices, Wanted, allocations, direction, outputs_of
from hqsweep.ops.quantize.request import Request


class Formats(NamedTuple):
    """Format texts of both directions, "" for an unwanted one, and what the kernels make of them.

    dequantized: columns are made from decoded rows. exact: whether rows, and columns, are exact operands. seen: the
    slot
    number (ops.quantize.nonfinite).
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
