"""The reference of the kernels, by the formats in torch: it defines the bytes, and serves identities."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hqsweep.formats import Buffers, Format, RngKey
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
        format, source = target.format, x.t() if i else x  # torch.compile calls no method of spec.format
        buffers = format.encode(source, _full_grid(format, source, target.grid), target.key)
        shape = tuple(source.shape)
        results[i] = format.operand(buffers, shape) if exact else buffers
        if statistics:
            keep_x = i == 0 or not request.dequantized
            if format.high_precision:
                sums[i] = gather_by_row(source, format, buffers, keep_x=keep_x)
            else:
                sums[i] = gather(source, format, buffers, columns=i == 1, keep_buffers=not exact, keep_x=keep_x)
        if i == 0 and request.dequantized:
            x = format.decode(buffers, shape).to(x.dtype)
    return *results, *sums


def _full_grid(format: Format, x: Tensor, grid: Buffers | None) -> Mapping[str, Tensor] | None:
    """Return a given grid, completed by the amaxes that it lacks."""
    return grid if grid is None else format.grid(x) | dict(grid)


def amax_by_reference(
    request: Request, x: Tensor, key: RngKey | None, amax: Tensor | None, outs: tuple[Tensor | None, Tensor | None]
) -> None:
    """Run find_amax() for one matrix. key, amax: of its rows."""
    for i, (spec, out) in enumerate(zip((request.row, request.column), outs, strict=True)):
        if spec is None:
            continue
        format, source = spec.format, x.t() if i else x
        if out is not None:
            out.copy_(torch.maximum(out, format.grid(source)[spec.amax_name].view_as(out)))
        if i == 0 and request.dequantized:
            known = amax if amax is not None else out
            grid = format.grid(x) | ({spec.amax_name: known.view(-1, 1)} if known is not None else {})
            x = format.decode(format.encode(x, grid, key), tuple(x.shape)).to(x.dtype)
