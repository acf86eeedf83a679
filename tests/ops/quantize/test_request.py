"""What quantize, find_amax and dequantize accept, what they refuse, and in which words."""

import pytest
import torch
from cases import KERNEL_PAIRS, STOCHASTIC_PAIRS
from support.ops.calls import find_amax, quantize
from support.ops.statistics import assert_same_row

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.quantize.dequantize import dequantize, exact_operand_of

KEY = RngKey(seed=7, slot="test", step=5)
X = draw("heavy", 48, 80)
BACKENDS = ("kernel", "reference")
WITH_AMAX = [
    pair for pair in KERNEL_PAIRS if any(parse(text).amax_name for text in pair) and pair not in STOCHASTIC_PAIRS
]


def refused(message, call, *arguments, **options):
    with pytest.raises(UserError, match=message) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shape_that_a_format_cannot_hold(backend):
    for text, axis in (
        ("nvfp4+2d", "16 columns .its blocks are 16 x 16."),
        ("mxfp4", "2 columns .its blocks are 1 x 32"),
    ):
        refused(
            rf"rowwise {text.replace('+', '.')} takes a multiple of {axis}.*the matrix has shape \(32, 31\)",
            quantize, torch.zeros(32, 31), parse(text), backend=backend,
        )  # fmt: skip
    refused(
        r"columnwise nvfp4 takes a multiple of 16 rows .its blocks are 1 x 16., and the matrix has shape \(33, 31\)",
        quantize, torch.zeros(3, 11, 31), parse("mxfp8"), parse("nvfp4"), backend=backend,
    )  # fmt: skip


def test_words_that_nobody_knows():
    mxfp8 = parse("mxfp8")
    wrong = {
        "columnwise_source": ("orignal", "columnwise_source is 'orignal' .did you mean 'original'"),
        "rowwise_output": ("code", "rowwise output is 'code' .did you mean 'codes'"),
        "columnwise_output": ("bytes", "columnwise output is 'bytes'.*allowed: codes, exact"),
        "backend": ("kernal", "backend is 'kernal' .did you mean 'kernel'"),
    }
    for name, (word, message) in wrong.items():
        refused(message, quantize, X, mxfp8, mxfp8, **{name: word})
    refused("backend is 'cuda'", dequantize, mxfp8.encode(X), mxfp8, (48, 80), backend="cuda")


def test_inputs_that_are_no_matrix_of_floats():
    refused("input is torch.float64; it takes float32, bfloat16 and float16", quantize, X.double(), parse("bf16"))
    refused("input is torch.int32", quantize, X.int(), parse("mxfp8"))
    refused(r"input has shape \(\)", quantize, torch.tensor(1.0), parse("mxfp8"))


def test_directions_that_are_missing():
    refused("there is no rowwise format", quantize, X, None, parse("mxfp8"), columnwise_source="rowwise_dequantized")
    assert quantize(X, None, None) == (None, None, None, None)
    with pytest.raises(ValueError, match=r"nvfp4\+sr: encode needs an RngKey"):
        quantize(X, parse("mxfp8"), parse("nvfp4+sr"), rowwise_key=KEY)


@pytest.mark.parametrize(
    ("text", "amax", "message"),
    [
        ("nvfp4", torch.ones(2, 1), r"nvfp4 is torch.float32 of shape \(2, 1\) on cpu; it takes 1 contiguous float32"),
        ("nvfp4+row_scaled", torch.ones(1, 1), "it takes 48 contiguous float32 on cpu"),
        ("nvfp4+row_scaled", torch.ones(48, 2)[:, :1], "on cpu, not contiguous"),
        ("fp8_current", torch.ones(1, 1, dtype=torch.float64), "fp8_current is torch.float64"),
    ],
)
def test_a_given_amax_that_the_kernel_cannot_read(text, amax, message):
    name = "s" if text == "fp8_current" else "g"
    refused(message, quantize, X, parse(text), rowwise_grid={name: amax}, backend="kernel")


@pytest.mark.parametrize("output", ["codes", "exact"])
@pytest.mark.parametrize("texts", WITH_AMAX)
def test_given_amaxes_of_any_two_dimensions_make_the_same_operands(texts, output):
    row, column = map(parse, texts)
    options = {"rowwise_output": output, "columnwise_output": output, "statistics": True}
    grids = {}
    for direction, format, matrix in (("rowwise_grid", row, X), ("columnwise_grid", column, X.t())):
        name = format.amax_name
        if name:
            grids[direction] = {name: format.grid(matrix)[name] * 3}
    reference = quantize(X, row, column, backend="reference", **options, **grids)
    flat = {direction: {n: t.flatten() for n, t in grid.items()} for direction, grid in grids.items()}
    for amaxes in (grids, flat):
        operands = quantize(X, row, column, backend="kernel", **options, **amaxes)
        for ours, theirs in zip(operands[:2], reference[:2], strict=True):
            ours, theirs = (
                o if isinstance(o, dict) else {"matrix": o.matrix.float(), "factor": o.factor} for o in (ours, theirs)
            )
            for name, tensor in theirs.items():
                assert (tensor is None and ours[name] is None) or torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("texts", [("nvfp4", "nvfp4+rht"), ("nvfp4+row_scaled", "fp8_current"), ("mxfp8+2d", "nvfp4")])
def test_a_found_amax_given_to_quantize_changes_nothing(texts, source):
    row, column = map(parse, texts)
    outs = {}
    for backend in BACKENDS:
        rows = torch.zeros(48 if row.text.endswith("row_scaled") else 1, 1)
        first = {} if texts[0] == "mxfp8+2d" else {"out_rowwise": rows}
        outs[backend] = rows, torch.zeros(1, 1)
        find_amax(X, row, column, columnwise_source=source, out_columnwise=outs[backend][1], backend=backend, **first)
    assert all(map(torch.equal, *outs.values()))
    rows, columns = outs["kernel"]
    grids = {"columnwise_grid": {"s" if texts[1] == "fp8_current" else "g": columns}}
    grids |= {} if texts[0] == "mxfp8+2d" else {"rowwise_grid": {"g": rows}}
    alone, told = (quantize(X, row, column, columnwise_source=source, **g) for g in ({}, grids))
    for direction in ("rowwise", "columnwise"):
        ours, theirs = getattr(told, direction), getattr(alone, direction)
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_amaxes_that_cannot_be_found():
    out, nvfp4 = torch.zeros(1, 1), parse("nvfp4")
    refused("mxfp8 has no global amax to find for rowwise out", find_amax, X, parse("mxfp8"), out_rowwise=out)
    refused("no format has no global amax to find for columnwise out", find_amax, X, nvfp4, out_columnwise=out)
    dequantized = {"columnwise_source": "rowwise_dequantized", "out_columnwise": out}
    refused("give rowwise amax or out", find_amax, X, nvfp4, nvfp4, **dequantized)
    refused("it takes 1 contiguous float32", find_amax, X, nvfp4, out_rowwise=torch.zeros(3, 1))
    find_amax(X, nvfp4, nvfp4)  # nothing asked for


def test_buffers_of_another_operand_are_refused():
    format = parse("nvfp4")
    buffers = format.encode(X)
    for decode in (dequantize, exact_operand_of):
        refused(r"buffer q of a nvfp4 operand \(48, 96\) is torch.uint8 \(48, 40\)", decode, buffers, format, (48, 96))
        refused("buffer g of a nvfp4 operand .* is missing", decode, {n: buffers[n] for n in "qs"}, format, (48, 80))
        wrong = buffers | {"s": buffers["s"].float()}
        refused(r"buffer s .* is torch.float32 \(48, 5\), not torch.uint8", decode, wrong, format, (48, 80))


def test_buffers_with_gaps_between_them_are_decoded():
    format = parse("mxfp8")
    buffers = format.encode(X)
    apart = {n: torch.cat([t, t], dim=1)[:, : t.shape[1]] for n, t in buffers.items()}
    assert torch.equal(dequantize(apart, format, (48, 80)), format.decode(buffers, (48, 80)))
    columns = {n: t.t().contiguous().t() for n, t in buffers.items()}
    assert torch.equal(
        exact_operand_of(columns, format, (48, 80)).matrix, format.operand(buffers, (48, 80)).matrix.float()
    )


def test_one_direction_without_a_kernel_leaves_the_other_its_own():
    """bf16 has no kernel; the pair is what the two are alone, in either place and from either source."""
    for texts in (("bf16", "nvfp4"), ("mxfp8", "bf16")):
        for source in ("original", "rowwise_dequantized"):
            formats = tuple(map(parse, texts))
            ours, theirs = (
                quantize(X, *formats, columnwise_source=source, statistics=True, backend=b)
                for b in ("auto", "reference")
            )
            for direction in ("rowwise", "columnwise"):
                operand, wanted = getattr(ours, direction), getattr(theirs, direction)
                assert all(torch.equal(operand[n], wanted[n]) for n in wanted)
                rows = [getattr(result, f"{direction}_statistics").row() for result in (ours, theirs)]
                assert_same_row(*rows)
