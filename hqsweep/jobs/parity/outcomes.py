"""Everything that the operators make of one matrix in one format, as named tensors to compare."""

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand, Format, RngKey
from hqsweep.ops import quantize as ops
from hqsweep.ops.stats import Statistics

SUMS_RTOL = 1e-5
"""Between the kernels' float32 sums of 128 x 128 elements and the reference's float64 sums."""
SUMS_ATOL = 1e-33
"""Squares below it are subnormal in float32, or gone."""


def outcomes(format: Format, x: Tensor, key: RngKey, backend: str) -> dict[str, Tensor]:
    """Codes, scales, amaxes and exact matrices of both directions in one call each, with found and with given amaxes,
    and what decoding the codes gives."""
    options = {"rowwise_key": key, "columnwise_key": key, "backend": backend}
    made = ops.quantize(x, format, format, **options)
    exact = ops.quantize(x, format, format, rowwise_output="exact", columnwise_output="exact", **options)
    amaxes, name = {}, format.amax_name
    if name:
        for direction, matrix in (("rowwise", x), ("columnwise", x.t())):
            amaxes[f"{direction}_grid"] = {name: format.grid(matrix)[name] * 2}
    given = ops.quantize(x, format, format, **amaxes, **options)
    results = {}
    for direction, shape in (("rowwise", tuple(x.shape)), ("columnwise", tuple(x.shape)[::-1])):
        buffers = getattr(made, direction)
        results |= {f"{direction} {name}": tensor for name, tensor in buffers.items()}
        results |= {f"{direction} {name}, given amax": t for name, t in getattr(given, direction).items()}
        decoded = ops.dequantize(buffers, format, shape, x.dtype, backend)
        again = ops.exact_operand_of(buffers, format, shape, backend)
        results[f"{direction} dequantized"] = one_nan(decoded)
        results[f"{direction} exact operand"] = _exact_matrix(getattr(exact, direction), format)
        results[f"{direction} exact operand of codes"] = _exact_matrix(again, format)
    return results


def gathered(format: Format, x: Tensor, key: RngKey, backend: str) -> dict[str, Tensor]:
    """Sums and counts of every tile and sums of every row, of both directions, as float32."""
    made = ops.quantize(x, format, format, rowwise_key=key, columnwise_key=key, statistics=True, backend=backend)
    rowwise, columnwise = _tensors(made.rowwise_statistics), _tensors(made.columnwise_statistics)
    named = {f"rowwise {name}": t for name, t in rowwise.items()}
    return named | {f"columnwise {name}": t for name, t in columnwise.items()}


def same_up_to_rounding(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """(expected, actual) pairs for a comparison of bytes, with the sums that are close enough made equal."""
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
    """float32, as the CPU has it, or rounded to the bfloat16 of the others where the format fits it."""
    return one_nan(operand.matrix.bfloat16().float() if format.fits_bf16 else operand.matrix)


def _tensors(statistics: Statistics) -> dict[str, Tensor]:
    sums = statistics.sums.float()
    return {"sums": sums[:, :3], "amax and counts": sums[:, 3:7], "row errors": statistics.row_errors.float()}
