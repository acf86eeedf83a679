"""Quantize an activation, or its gradient, from what it is computed of: on CUDA one pass, without the matrix between.

The bytes are those of quantize() of activation() or activation_backward(), by which the operator itself computes what
no kernel does at once.
"""

from torch import Tensor

from hqsweep.ops.activation import INPUTS, activation, activation_backward, check_gradient, check_input
from hqsweep.ops.kernels import DTYPES, kernel_of
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.outputs import NO_STREAM, Matrices, Wanted, allocations, direction, outputs_of
from hqsweep.ops.request import Request, check_shape


def shape_of(z: Tensor, dh: Tensor | None, kind: str) -> tuple[int, int]:
    """That of the matrix which is quantized."""
    return (z.shape[0], z.shape[1] // INPUTS[kind]) if dh is None else (z.shape[0], z.shape[1])


def _fake(z, dh, kind, rowwise, columnwise, dequantized, exact):
    matrix, shapes = Matrices(*shape_of(z, dh, kind)), []
    for text, across, decoded in ((rowwise, False, exact[0]), (columnwise, True, exact[1])):
        if text:
            shapes += allocations(matrix, Wanted(text, across, decoded, False), True)
    return [z.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


@operator(
    "quantize_activated(Tensor z, Tensor? dh, str kind, str rowwise, str columnwise, bool dequantized, "
    "bool[2] exact) -> Tensor[]",
    fake=_fake,
    devices=("CUDA",),
)
def _by_operator(z, dh, kind, rowwise, columnwise, dequantized, exact):
    """The outputs of hqsweep::quantize of h, or with dh of z's gradient. exact: of rows, and of columns.

    ValueError for formats that draw random bits or have a global amax, and as activation()."""
    check_input(z, kind)
    if dh is not None:
        check_gradient(dh, z, kind)
    if len(exact) != 2:
        raise ValueError(f"exact is {exact}; it takes one for rows and one for columns")
    for text in filter(None, (rowwise, columnwise)):
        if not _is_of_blocks(text):
            raise ValueError(f"{text} draws random bits or has a global amax; quantize() takes it")
    rows, cols = shape_of(z, dh, kind)
    row_outputs, column_outputs = outputs_of(
        (rows, cols, None, None),
        (rowwise, False, exact[0], False) if rowwise else None,
        (columnwise, True, exact[1], False) if columnwise else None,
        True,
    )
    tensors, scratch, row, column = [], [], None, None
    if rowwise:
        row = direction(row_outputs, z, tensors, scratch, NO_STREAM, None)
    if columnwise:
        column = direction(column_outputs, z, tensors, scratch, NO_STREAM, None)
    of = (kind, rows, z.shape[1] // INPUTS[kind], z.data_ptr(), 0 if dh is None else dh.data_ptr())
    if not extension().quantize_activated_cuda(*of, row, column, dequantized, *where(z)):
        (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
        call = (x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized)
        extension().quantize_cuda(*call, *where(z))
    return tensors


def _is_of_blocks(text: str) -> bool:
    spec = kernel_of(text)
    return spec.amax_name is None and not spec.stochastic


def takes_formats(request: Request) -> bool:
    """Whether quantize_activated() takes the formats: those with a kernel whose scales are all found in blocks, without
    random bits."""
    texts = [text for text in (request.row_text, request.column_text) if text]
    return bool(texts) and request.kernels and all(map(_is_of_blocks, texts))


def quantize_activated(request: Request, z: Tensor, dh: Tensor | None, kind: str) -> list[Tensor]:
    """The outputs of the operator quantize for h = activation(z), or with dh for the gradient of z (see quantized_of).

    For formats that takes_formats(), and a z that activation() takes. UserError for a shape that a format cannot hold.
    """
    check_shape(request, shape_of(z, dh, kind))
    exact = [request.row_exact, request.column_exact]
    return _by_operator(z, dh, kind, request.row_text, request.column_text, request.dequantized, exact)
