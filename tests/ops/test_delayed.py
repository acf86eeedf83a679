"""fp8_delayed runs in the kernels of fp8_current, under an amax that is given and never under the tensor's own."""

import pytest
import torch
from support.ops.calls import find_amax, quantize

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.formats.inputs import DISTRIBUTIONS, draw
from hqsweep.ops.quantize.dequantize import dequantize

PAIRS = [
    ("fp8_delayed", "fp8_delayed", "original"),
    ("fp8_delayed+e5m2", "fp8_current", "original"),
    ("mxfp8", "fp8_delayed+e5m2", "rowwise_dequantized"),
    ("fp8_delayed", "fp8_delayed+e5m2", "rowwise_dequantized"),
    ("fp8_delayed", None, "original"),
    (None, "fp8_delayed", "original"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def formats(*texts):
    return tuple(text and parse(text) for text in texts)


def grids(*texts, amax, device="cpu"):
    grid = {"s": torch.full((1, 1), amax, device=device)}
    names = ("rowwise_grid", "columnwise_grid")
    return {n: grid for n, text in zip(names, texts, strict=True) if text and "delayed" in text}


def bits(operand):
    """Bytes of the buffers, or of an exact operand."""
    tensors = operand.values() if isinstance(operand, dict) else [operand.matrix.float(), operand.factor]
    return [t.cpu().contiguous().view(torch.uint8) for t in tensors if t is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amax", [0.0, 0.7, 300.0, 1e-40, float("inf")])
@pytest.mark.parametrize(("row", "column", "source"), PAIRS)
def test_kernel_equals_reference_under_a_given_amax(row, column, source, amax, device):
    for distribution in sorted(set(DISTRIBUTIONS) - {"nonfinite"}):
        x = draw(distribution, 48, 80)
        for output in ("codes", "exact"):
            options = {"columnwise_source": source, "rowwise_output": output, "columnwise_output": output}
            expected, actual = (
                quantize(
                    x.to(d), *formats(row, column), **options, **grids(row, column, amax=amax, device=d), backend=b
                )
                for d, b in (("cpu", "reference"), (device, "kernel"))
            )
            for direction in ("rowwise", "columnwise"):
                e, a = getattr(expected, direction), getattr(actual, direction)
                assert (e is None) == (a is None)
                assert e is None or all(map(torch.equal, bits(e), bits(a))), (distribution, output, direction)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["reference", "kernel"])
@pytest.mark.parametrize("decoded", [False, True])
def test_found_amaxes_are_merged_into_what_is_there(backend, decoded, device):
    """A decoded row has its values under the given amax, 2 of at most 5; both outs are maxima over two matrices."""
    row, column = formats("fp8_delayed", "fp8_delayed+e5m2")
    outs = {name: torch.zeros(1, 1, device=device) for name in ("out_rowwise", "out_columnwise")}
    options = {"columnwise_source": "rowwise_dequantized"} if decoded else {}
    options |= {"rowwise_amax": torch.full((1, 1), 2.0, device=device)} if decoded else {}
    for top in (5.0, 3.0):
        x = draw("normal", 48, 80).clamp(-1, 1).to(device)
        x[7, 9] = -top
        find_amax(x, row, column, **options, **outs, backend=backend)
    assert [out.item() for out in outs.values()] == [5.0, 2.0 if decoded else 5.0]


@pytest.mark.parametrize("backend", ["auto", "reference", "kernel"])
def test_the_tensors_own_amax_never_stands_in(backend):
    x = draw("normal", 16, 32)
    row, column = formats("mxfp8", "fp8_delayed+e5m2")
    with pytest.raises(UserError, match=r"columnwise fp8_delayed\+e5m2 takes its scale from the amaxes of earlier"):
        quantize(x, row, column, backend=backend)
    with pytest.raises(UserError, match=r"rowwise fp8_delayed .* give states, or a target with grid"):
        quantize(x, parse("fp8_delayed"), column, columnwise_grid={"s": torch.ones(1, 1)}, backend=backend)
    outs = {name: torch.zeros(1, 1) for name in ("out_rowwise", "out_columnwise")}
    with pytest.raises(UserError, match=r"decoding fp8_delayed rows needs their amax: give rowwise amax$"):
        find_amax(x, parse("fp8_delayed"), column, columnwise_source="rowwise_dequantized", **outs, backend=backend)


def test_statistics_are_those_of_the_given_amax():
    x, grid = draw("normal", 48, 80), {"s": torch.full((1, 1), 1.0)}
    operands = quantize(x, parse("fp8_delayed"), rowwise_grid=grid, statistics=True)
    row = operands.rowwise_statistics.row()
    values = dequantize(operands.rowwise, parse("fp8_delayed"), (48, 80))
    assert row["scale_max"] == pytest.approx(1 / 448) and values.abs().max() == pytest.approx(1.0)
    assert row["amax"] == x.abs().max() and row["saturation_pct"] > 20
