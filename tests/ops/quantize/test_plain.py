"""The short way of quantize() gives the bytes of ops.quantize, and leaves to it what it does not take."""

from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from cases import FEW, LOW_BASES, STATELESS, crossed

from hqsweep.formats import ExactOperand
from hqsweep.formats.inputs import draw
from hqsweep.ops.quantize.dequantize import exact_operand_of
from hqsweep.ops.quantize.quantize import Pair, quantize, quantize_plain
from hqsweep.ops.quantize.request import NO_TARGET, Target
from hqsweep.ops.splits import Splits
from hqsweep.quant import HybridQuantizer

SPLITS = (48, 0, 16, 176)
ROWS, COLS = sum(SPLITS), 96
OUTPUTS = [("codes", "exact"), ("exact", "codes"), ("exact", None), (None, "exact")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


ALONE = [text for text in STATELESS if HybridQuantizer.parse(text).takes_values_alone]


def pair_of(text, outputs=("codes", "codes"), **options):
    quantizer = HybridQuantizer.parse(text)
    return Pair(str(quantizer.rowwise), str(quantizer.columnwise), quantizer.columnwise_source, *outputs, **options)


def usual(x, splits, text, outputs, by_rows):
    """ops.quantize, without a rowwise result that is only read on the way to the columnwise one."""
    quantizer, (row_output, column_output) = HybridQuantizer.parse(text), outputs
    dequantized = column_output is not None and quantizer.columnwise_source == "rowwise_dequantized"
    row = Target(quantizer.rowwise, row_output or "codes") if row_output or dequantized else NO_TARGET
    column = Target(quantizer.columnwise, column_output, by_rows=by_rows) if column_output else NO_TARGET
    source = quantizer.columnwise_source if column_output else "original"
    results = quantize(x, row, column, columnwise_source=source, splits=splits)
    return results.rowwise if row_output else None, results.columnwise


def assert_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, ExactOperand):
        got, wanted = ({f.name: getattr(own, f.name) for f in fields(own)} for own in (got, wanted))
    for name, value in (wanted or {}).items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


@devices
@pytest.mark.parametrize(("text", "sizes"), crossed(ALONE, [None, SPLITS]), ids=str)
def test_the_bytes_are_those_of_ops_quantize(text, sizes, device):
    splits = None if sizes is None else Splits.of(sizes, ROWS)
    for dtype in (torch.bfloat16, torch.float32):
        x = draw("heavy", COLS, ROWS, dtype=dtype).to(device).t()
        for outputs in OUTPUTS:
            *got, exact = quantize_plain(x, splits, pair_of(text, outputs, by_rows=True))
            assert exact is None
            for own, wanted in zip(got, usual(x, splits, text, outputs, by_rows=True), strict=True):
                assert_same(own, wanted)


@devices
@pytest.mark.parametrize(("text", "column"), crossed(ALONE, ["codes", None]))
def test_codes_that_are_sent_come_decoded_and_in_one_memory(text, column, device):
    x, shape = draw("heavy", ROWS, COLS, dtype=torch.bfloat16).to(device), (ROWS, COLS)
    row, of_columns, exact = quantize_plain(x, None, pair_of(text, ("codes", column), decoded=True))
    for own, wanted in zip((row, of_columns), usual(x, None, text, ("codes", column), by_rows=False), strict=True):
        assert_same(own, wanted)
    format = HybridQuantizer.parse(text).rowwise
    assert (exact is None) == (format.amax_name is not None)
    if exact is not None:
        assert_same(exact, exact_operand_of(row, format, shape))
        first, *others = row.values()
        for before, buffer in pairwise([first, *others]):
            assert buffer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            assert buffer.data_ptr() == before.data_ptr() + -(-before.nbytes // 16) * 16


def test_a_parameter_goes_the_short_way():
    weight = torch.nn.Parameter(draw("normal", 32, 64))
    for text in LOW_BASES:
        if not HybridQuantizer.parse(text).delayed:
            assert quantize_plain(weight, None, pair_of(text)) is not None


@pytest.mark.parametrize(
    ("text", "shape", "sizes"),
    [
        ("nvfp4+sr", (32, 64), None),  # which takes a key
        ("fp8_delayed", (32, 64), None),  # an amax
        ("bf16|mxfp8", (32, 64), None),  # holds x
        ("nvfp4", (32, 40), None),  # an error follows
        ("nvfp4", (40, 32), None),
        ("nvfp4", (64, 32), (40, 24)),  # a call for each member, which gives the error
        ("mxfp8", (64, 32), (32, 31)),
        ("mxfp8", (0, 32), ()),
        ("mxfp8", (2, 32, 64), None),
    ],
)
def test_what_it_leaves_to_ops_quantize(text, shape, sizes):
    splits = None if sizes is None else Splits(rows=sum(sizes), count=len(sizes), sizes=sizes)
    assert quantize_plain(torch.zeros(shape), splits, pair_of(text)) is None


@pytest.mark.parametrize("text", FEW)
def test_nothing_is_asked_for(text):
    assert quantize_plain(draw("normal", 32, 64), None, pair_of(text, (None, None))) is None
