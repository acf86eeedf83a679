"""Everything that the operators make of one matrix in one format, as named tensors to compare."""

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand, Format, RngKey
from hqsweep.ops.quantize.dequantize import dequantize, exact_operand_of
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.stats import Statistics

SUMS_RTOL = 1e-5
"""The relative tolerance between the kernels' float32 sums of 128 x 128 elements and the reference's float64 sums."""
SUMS_ATOL = 1e-33
"""The absolute tolerance: smaller squares are subnormal in float32, or zero."""


def outcomes(format: Format, x: Tensor, key: RngKey, backend: str) -> dict[str, Tensor]:
    """The codes, scales, amaxes and exact matrices of both directions in one call each, with amaxes that are found and
    that are given, and the values that decoding the codes gives."""
    codes, exact = (Target(format, output, key) for output in ("codes", "exact"))
    encoded, exact = (quantize(x, target, target, backend=backend) for target in (codes, exact))
    grids, name = (None, None), format.amax_name
    if name:
        grids = tuple({name: format.grid(matrix)[name] * 2} for matrix in (x, x.t()))
    with_amax = quantize(x, *(codes._replace(grid=grid) for grid in grids), backend=backend)
    results = {}
    for direction, shape in (("rowwise", tuple(x.shape)), ("columnwise", tuple(x.shape)[::-1])):
        buffers = getattr(encoded, direction)
        results |= {f"{direction} {name}": tensor for name, tensor in buffers.items()}
        results |= {f"{direction} {name}, given amax": t for name, t in getattr(with_amax, direction).items()}
        decoded = dequantize(buffers, format, shape, x.dtype, backend)
        again = exact_operand_of(buffers, format, shape, backend)
        results[f"{direction} dequantized"] = one_nan(decoded)
        results[f"{direction} exact operand"] = _exact_matrix(getattr(exact, direction), format)
        results[f"{direction} exact operand of codes"] = _exact_matrix(again, format)
    return results


def gathered(format: Format, x: Tensor, key: RngKey, backend: str) -> dict[str, Tensor]:
    """The sums and counts of every tile, and the sums of every row, in both directions, as float32."""
    quantized = quantize(x, Target(format, key=key), Target(format, key=key), statistics=True, backend=backend)
    rowwise, columnwise = _tensors(quantized.rowwise_statistics), _tensors(quantized.columnwise_statistics)
    named = {f"rowwise {name}": t for name, t in rowwise.items()}
    return named | {f"columnwise {name}": t for name, t in columnwise.items()}


def same_up_to_rounding(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(expected, actual) pairs for a comparison of bytes, in which sums that are close enough are made equal."""
    pairs = {}
    for name, e in expected.items():
        a = actual[name].to(e.device)
        if not name.endswith("counts"):
            a = torch.where(torch.isclose(a, e, rtol=SUMS_RTOL, atol=SUMS_ATOL, equal_nan=True), e, a)
        pairs[name] = (e, a)
    return pairs


def one_nan(x: Tensor) -> Tensor:
    """x with one bit pattern for every NaN: torch's float32 to bfloat16 has several, by device and vector width."""
    return torch.where(x.isnan(), torch.nan, x)


def _exact_matrix(operand: ExactOperand, format: Format) -> Tensor:
    """The exact matrix in float32, as the CPU has it, or rounded to bfloat16, as others have it, where the format fits
    that."""
    return one_nan(operand.matrix.bfloat16().float() if format.fits_bf16 else operand.matrix)


def _tensors(statistics: Statistics) -> dict[str, Tensor]:
    sums = statistics.sums.float()
    return {"sums": sums[:, :3], "amax and counts": sums[:, 3:7], "row errors": statistics.row_errors.float()}
