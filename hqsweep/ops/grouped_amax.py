"""Find the global amaxes of many experts, each of its own rows, as what delayed scaling will remember of a step."""

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.ops import kernel_grouped
from hqsweep.ops.dequantize import Backend
from hqsweep.ops.grouped import Keys, fits
from hqsweep.ops.grouped_layout import Splits
from hqsweep.ops.plan import Plan
from hqsweep.ops.quantize import check_amaxes, find_amax
from hqsweep.ops.request import NOTHING_GIVEN, Source, as_matrix, request_of, use_kernel


def find_amax_grouped(
    x: Tensor,
    splits: Splits,
    rowwise: Format | None,
    columnwise: Format | None = None,
    *,
    columnwise_source: Source = "original",
    rowwise_keys: Keys = None,
    rowwise_amaxes: Tensor | None = None,
    out_rowwise: Tensor | None = None,
    out_columnwise: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """out[e] = max(out[e], global amax of expert e's rows of x [rows, width]) in place; NaN is ignored.

    Amaxes are float32, flat and packed: [E], or for +row_scaled [rows] and, columnwise, [E * width]. To the byte this
    is ops.quantize.find_amax of each expert, whose arguments these are, one entry for each; UserError as there.

    One call of the kernel for all experts, which does not wait for splits that only the device knows; where there is
    none, a call for each expert, which does.
    """
    if rowwise and rowwise.high_precision and columnwise_source == "rowwise_dequantized":
        x, rowwise, columnwise_source = x.to(rowwise.dtype).to(x.dtype), None, "original"
    x = as_matrix(x)
    if splits.rows != len(x):
        raise UserError(f"find_amax_grouped: splits of {splits.rows} rows for a matrix of shape {tuple(x.shape)}")
    decodes = columnwise_source == "rowwise_dequantized"
    row = rowwise if out_rowwise is not None or decodes else None
    column = columnwise if out_columnwise is not None else None
    request = request_of(row, column, columnwise_source, "codes", "codes")
    amaxes = (rowwise_amaxes, out_rowwise, out_columnwise)
    check_amaxes(request, x, *amaxes, matrices=splits.count)
    if out_rowwise is None and out_columnwise is None:
        return
    random = request.dequantized and request.row.stochastic
    known = not random or (rowwise_keys is not None and None not in rowwise_keys)
    if not (known and use_kernel(request, x, NOTHING_GIVEN, backend) and fits(request, x, splits)):
        given = {"columnwise_source": columnwise_source, "backend": backend}
        for expert, span in enumerate(splits.spans):
            if span[1] > span[0]:
                own = {"rowwise_amax": _own(rowwise_amaxes, request.row, span, expert)}
                own["out_rowwise"] = _own(out_rowwise, request.row, span, expert)
                lines = (expert * x.shape[1], (expert + 1) * x.shape[1])
                own["out_columnwise"] = _own(out_columnwise, request.column, lines, expert)
                key = rowwise_keys[expert] if rowwise_keys else None
                find_amax(x[slice(*span)], row, column, rowwise_key=key, **own, **given)
    else:
        table, step = (kernel_grouped.key_table(rowwise_keys, x.device), rowwise_keys[0].step) if random else (None, 0)
        facts = (request.row_text, request.column_text, request.dequantized, table, step)
        kernel_grouped.find_amax_grouped(x, splits.offsets(x.device), *facts, *amaxes)


def _own(amaxes: Tensor | None, p: Plan, lines: tuple[int, int], expert: int) -> Tensor | None:
    """Those of one expert, whose operand has these lines of all that follow each other."""
    if amaxes is None:
        return None
    return amaxes[slice(*lines)] if p.row_scaled else amaxes[expert : expert + 1]
