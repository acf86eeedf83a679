"""The reference of the kernels, by the formats in torch: it defines the bytes, and serves identities."""

from collections.abc import Mapping

from torch import Tensor

from hqsweep.formats import Format
from hqsweep.ops.quantize.request import Request, Target
from hqsweep.ops.stats import gather, gather_by_row


def by_reference(request: Request, x: Tensor, row: Target, column: Target, statistics: bool) -> tuple:
    """Return the fields of Quantized for one matrix."""
    results, sums = [None, None], [None, None]
    for i, (spec, exact, target) in enumerate(
        ((request.row, request.row_exact, row), (request.column, request.column_exact, column))
    ):
        if spec is None:
            continue
        format, source = target.format, x.t() if i else x  # torch.compile cannot call spec.format's methods
        buffers = format.encode(source, _full_grid(format, source, target), target.key)
        shape = tuple(source.shape)
        results[i] = format.operand(buffers, shape) if exact else buffers
        if statistics:
            keep_x = i == 0 or not request.dequantized
            if format.high_precision:
                sums[i] = gather_by_row(source, format, buffers, keep_x=keep_x)
            else:
                options = {"keep_buffers": not exact, "keep_x": keep_x, "key": target.key}
                sums[i] = gather(source, format, buffers, columns=i == 1, **options)
        if i == 0 and request.dequantized:
            x = format.decode(buffers, shape).to(x.dtype)
    return *results, *sums


def _full_grid(format: Format, x: Tensor, target: Target) -> Mapping[str, Tensor] | None:
    """Return a given grid, completed by the amaxes that it lacks."""
    return target.grid if target.grid is None else format.grid(x, target.key) | dict(target.grid)
