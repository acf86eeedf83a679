"""Quantize a matrix along its rows, its columns, or both in one read: check, dispatch, return."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import NVFP4, Buffers, ExactOperand, Format, Fp8Current, RngKey
from hqsweep.ops import kernel, stats

Backend = Literal["auto", "reference", "kernel"]
Output = Literal["codes", "exact"]
_NO_KEY = [0, 0, 0]


class Quantized(NamedTuple):
    """What quantize() made; None for what was not asked for. The columnwise results are those of x.T."""

    rowwise: dict[str, Tensor] | ExactOperand | None = None
    columnwise: dict[str, Tensor] | ExactOperand | None = None
    rowwise_statistics: dict[str, float] | None = None
    columnwise_statistics: dict[str, float] | None = None
    rowwise_row_errors: Tensor | None = None
    """float64 [operand rows] sum of (x - q)^2, with statistics."""
    columnwise_row_errors: Tensor | None = None


class _Side:
    """One direction of a request."""

    __slots__ = ("exact", "format", "grid", "key", "output")

    def __init__(self, format: Format | None, output: Output, key: RngKey | None, grid: Buffers | None) -> None:
        self.format, self.output, self.key, self.grid = format, output, key, grid
        self.exact = output == "exact"

    @property
    def text(self) -> str:
        return "" if self.format is None else self.format.text

    @property
    def key_words(self) -> list[int]:
        if self.key is None:
            if getattr(self.format, "sr", False):
                raise ValueError(f"{self.format}: encode needs an RngKey")
            return _NO_KEY
        return [*self.key.words, self.key.step]

    @property
    def amax(self) -> Tensor | None:
        """The given global amax, which is all of a grid that kernels take."""
        return None if self.grid is None else self.grid[_amax_name(self.format)]

    @property
    def kernel_grid(self) -> bool:
        return self.grid is None or isinstance(self.format, Fp8Current) or set(self.grid) == {"g"}


def quantize(
    x: Tensor,
    rowwise: Format | None,
    columnwise: Format | None = None,
    *,
    columnwise_source: str = "original",
    rowwise_output: Output = "codes",
    columnwise_output: Output = "codes",
    rowwise_key: RngKey | None = None,
    columnwise_key: RngKey | None = None,
    rowwise_grid: Buffers | None = None,
    columnwise_grid: Buffers | None = None,
    statistics: bool = False,
    backend: Backend = "auto",
) -> Quantized:
    """bf16, fp16 or fp32 [..., cols], leading axes folded to rows -> operands of the directions that have a format.

    Rowwise blocks run along cols; the columnwise operand encodes x.T [cols, rows]. columnwise_source
    "rowwise_dequantized" makes it from the decoded rowwise operand, rounded to x's dtype (rowwise is needed then).
    output "codes": the format's buffers; "exact": what gemm=exact multiplies, format.operand(codes), with a float32
    matrix from the CPU kernel and a bfloat16 one from CUDA and the reference (fp8_block+fp32_scale: always float32).
    grid: amaxes agreed on elsewhere (another rank, an earlier pass); the kernels take a global amax ({"g": ...}, or
    fp8_current's {"s": ...}), the reference all. key: stream of +sr. statistics: rows of ops.stats, gathered while
    quantizing; reading them waits for the device. backend "auto": the kernel where there is one, with the same bytes.
    """
    x = x if x.dim() == 2 else _matrix(x)
    dequantized = columnwise is not None and columnwise_source == "rowwise_dequantized"
    if dequantized and rowwise is None:
        raise ValueError("quantize: columnwise_source is rowwise_dequantized but there is no rowwise format")
    row = _Side(rowwise, rowwise_output, rowwise_key, rowwise_grid)
    column = _Side(columnwise, columnwise_output, columnwise_key, columnwise_grid)
    known = rowwise is not None or columnwise is not None
    supported = known and kernel.takes(x.dtype, x.device.type, rowwise, columnwise)
    supported = supported and row.kernel_grid and column.kernel_grid
    if supported and backend != "reference":
        return _by_kernel(x, row, column, dequantized, statistics)
    return _without_kernel(x, row, column, dequantized, statistics, backend)


def _without_kernel(
    x: Tensor, row: "_Side", column: "_Side", dequantized: bool, statistics: bool, backend: Backend
) -> Quantized:
    sides = [s for s in (row, column) if s.format is not None]
    if not sides:
        return Quantized()
    if backend == "kernel":
        texts = " and ".join(s.text for s in sides)
        raise UserError(f"no kernel for {texts} of {x.dtype} {tuple(x.shape)} on {x.device}; use backend reference")
    if len(sides) == 2 and backend == "auto":  # perhaps one of them has a kernel
        return _one_by_one(x, row, column, dequantized, statistics)
    return _by_reference(x, row, column, dequantized, statistics)


def encode(
    x: Tensor, format: Format, *, grid: Buffers | None = None, key: RngKey | None = None, backend: Backend = "auto"
) -> dict[str, Tensor]:
    """quantize() to the codes of one rowwise format."""
    return quantize(x, format, rowwise_grid=grid, rowwise_key=key, backend=backend).rowwise


def exact_operand(x: Tensor, format: Format, *, key: RngKey | None = None, backend: Backend = "auto") -> ExactOperand:
    """quantize() to the exact operand of one rowwise format."""
    return quantize(x, format, rowwise_output="exact", rowwise_key=key, backend=backend).rowwise


def find_amax(
    x: Tensor,
    rowwise: Format | None,
    columnwise: Format | None = None,
    *,
    columnwise_source: str = "original",
    rowwise_key: RngKey | None = None,
    rowwise_amax: Tensor | None = None,
    out_rowwise: Tensor | None = None,
    out_columnwise: Tensor | None = None,
) -> None:
    """out = max(out, global amax) in place: float32 [1, 1], or [operand rows, 1] for +row_scaled; NaN is ignored.

    Only directions with an `out` are scanned. With rowwise_dequantized the columnwise amax is that of the decoded
    rowwise operand, whose own amax is given as rowwise_amax or was found in out_rowwise.
    """
    x = _matrix(x)
    dequantized = columnwise is not None and columnwise_source == "rowwise_dequantized"
    if kernel.supports(x, *(f for f in (rowwise, columnwise) if f)):
        texts = tuple(f.text if f else "" for f in (rowwise, columnwise))
        key = _Side(rowwise, "codes", rowwise_key, None).key_words if rowwise else _NO_KEY
        torch.ops.hqsweep.find_amax_(x, *texts, dequantized, key, rowwise_amax, out_rowwise, out_columnwise)
        return
    if out_rowwise is not None:
        out_rowwise.copy_(torch.maximum(out_rowwise, rowwise.grid(x)[_amax_name(rowwise)]))
    if out_columnwise is None:
        return
    if dequantized:
        known = rowwise_amax if rowwise_amax is not None else out_rowwise
        grid = None if known is None else rowwise.grid(x) | {_amax_name(rowwise): known}
        x = rowwise.decode(rowwise.encode(x, grid, rowwise_key), tuple(x.shape)).to(x.dtype)
    out_columnwise.copy_(torch.maximum(out_columnwise, columnwise.grid(x.t())[_amax_name(columnwise)]))


def dequantize(
    buffers: Buffers, format: Format, shape: tuple[int, int], dtype: torch.dtype = torch.float32,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Buffers of an operand -> its values [rows, cols] in TransformerEngine's order of operations, rounded to dtype."""
    if _decodes_by_kernel(buffers, format, backend) and dtype in kernel.DTYPES:
        return torch.ops.hqsweep.dequantize([buffers[n] for n in format.layout], str(format), *shape, False, dtype)
    return format.decode(buffers, shape).to(dtype)


def exact_operand_of(
    buffers: Buffers, format: Format, shape: tuple[int, int], backend: Backend = "auto"
) -> ExactOperand:
    """Buffers of an operand -> what gemm=exact multiplies, as quantize(..., rowwise_output="exact") gives it."""
    if not _decodes_by_kernel(buffers, format, backend):
        return format.operand(buffers, shape)
    dtype = kernel.exact_dtype(format, next(iter(buffers.values())).device.type)
    matrix = torch.ops.hqsweep.dequantize([buffers[n] for n in format.layout], str(format), *shape, True, dtype)
    return _exact(format, [matrix, *(buffers[n] for n in (kernel.plan(format.text).factor,) if n)])


def _matrix(x: Tensor) -> Tensor:
    if x.dim() < 2:
        raise ValueError(f"quantize: input has shape {tuple(x.shape)}; it takes [..., rows, cols]")
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _amax_name(format: Format) -> str:
    return "g" if isinstance(format, NVFP4) else "s"


def _decodes_by_kernel(buffers: Buffers, format: Format, backend: Backend) -> bool:
    first = next(iter(buffers.values()))
    known = kernel.spec_fields(format) is not None
    return known and backend != "reference" and kernel.takes(torch.float32, first.device.type, format)


def _by_kernel(x: Tensor, row: _Side, column: _Side, dequantized: bool, statistics: bool) -> Quantized:
    made = kernel.quantize(
        x, row.text, column.text, dequantized, row.exact, column.exact, row.key_words, column.key_words, row.amax,
        column.amax, statistics,
    )  # fmt: skip
    first, rest = _take(row, made, statistics)
    second, _ = _take(column, rest, statistics)
    if not statistics:
        return Quantized(first[0], second[0])
    rows = [_statistics(x, side, taken) for side, taken in ((row, first), (column, second))]
    return Quantized(first[0], second[0], rows[0][0], rows[1][0], rows[0][1], rows[1][1])


def _take(side: _Side, made: list[Tensor], statistics: bool) -> tuple[list, list[Tensor]]:
    """A side's results from the front of all: [buffers or ExactOperand, sums, row errors], and the others'."""
    if side.format is None:
        return [None], made
    p = kernel.plan(side.text)
    if side.exact:
        count = 2 if p.factor else 1
        result = _exact(side.format, made[:count])
    else:
        count = len(p.names)
        result = dict(zip(p.names, made, strict=False))
    end = count + 2 if statistics else count
    return [result, *made[count:end]], made[end:]


def _statistics(x: Tensor, side: _Side, taken: list) -> tuple[dict[str, float] | None, Tensor | None]:
    if side.format is None:
        return None, None
    made, sums, row_errors = taken
    values = stats.from_sums(sums, x.numel(), side.format, None if side.exact else made)
    return values, row_errors.double().sum(dim=1)


def _exact(format: Format, tensors: list[Tensor]) -> ExactOperand:
    divisor = 6.0 * format.scale_max if isinstance(format, NVFP4) else 1.0
    return ExactOperand(tensors[0], tensors[1] if len(tensors) > 1 else None, divisor)


def _one_by_one(x: Tensor, row: _Side, column: _Side, dequantized: bool, statistics: bool) -> Quantized:
    """Each direction by itself, so that one without a kernel does not cost the other its own."""
    first = _alone(x, _Side(row.format, "codes", row.key, row.grid) if dequantized else row, statistics)
    made = first.rowwise
    if dequantized:
        x = dequantize(made, row.format, tuple(x.shape), x.dtype)
        made = exact_operand_of(made, row.format, tuple(x.shape)) if row.exact else made
    second = _alone(x.t(), column, statistics)
    rows = (first.rowwise_statistics, second.rowwise_statistics, first.rowwise_row_errors, second.rowwise_row_errors)
    return Quantized(made, second.rowwise, *rows)


def _alone(x: Tensor, side: _Side, statistics: bool) -> Quantized:
    options = {"rowwise_output": side.output, "rowwise_key": side.key, "rowwise_grid": side.grid}
    return quantize(x, side.format, statistics=statistics, **options)


def _by_reference(x: Tensor, row: _Side, column: _Side, dequantized: bool, statistics: bool) -> Quantized:
    results, rows, errors = [None, None], [None, None], [None, None]
    for i, side in enumerate((row, column)):
        if side.format is None:
            continue
        source = x.t() if i else x
        grid = side.grid
        if grid is not None and set(grid) == {"g"}:  # the blocks' own amaxes are not given
            grid = side.format.grid(source) | dict(grid)
        buffers = side.format.encode(source, grid, side.key)
        shape = tuple(source.shape)
        results[i] = side.format.operand(buffers, shape) if side.exact else buffers
        if statistics:
            rows[i] = stats.tensor_error(source, side.format, buffers)
            lost = side.format.basis(source).double() - side.format.decode(buffers, shape).double()
            errors[i] = lost.square().sum(dim=1)
        if i == 0 and dequantized:
            x = side.format.decode(buffers, shape).to(x.dtype)
    return Quantized(*results, *rows, *errors)
