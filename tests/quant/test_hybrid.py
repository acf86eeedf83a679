"""Hybrid quantizers: text and dict forms, directions, sources."""

import pickle

import pytest
import torch
from cases import SOME

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.stats import gather
from hqsweep.quant import HybridQuantizer, flatten, unflatten

KEY = RngKey(seed=0, slot="t", step=1)


@pytest.mark.feature("F28", "F33", "F34")
@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("mxfp8", "mxfp8"),
        ("mxfp8|mxfp8", "mxfp8"),
        ("nvfp4|mxfp8", "nvfp4|mxfp8"),
        ("nvfp4+row_scaled|mxfp8@rowwise_dequantized", "nvfp4+row_scaled|mxfp8@rowwise_dequantized"),
        ("nvfp4+rht+sr", "nvfp4+rht+sr"),
        ("nvfp4+sr|nvfp4+rht+sr", "nvfp4+rht+sr"),
        ("mxfp8@original", "mxfp8"),
    ],
)
def test_text_form(text, printed):
    quantizer = HybridQuantizer.parse(text)
    assert str(quantizer) == printed
    assert HybridQuantizer.parse(printed) == quantizer
    assert pickle.loads(pickle.dumps(quantizer)) == quantizer


def test_rht_for_both_directions_means_columnwise():
    quantizer = HybridQuantizer.parse("nvfp4+rht")
    assert (quantizer.rowwise, quantizer.columnwise) == (parse("nvfp4"), parse("nvfp4+rht"))


def test_dict_form():
    section = {"rowwise": "nvfp4", "columnwise": "mxfp8", "columnwise_source": "rowwise_dequantized"}
    assert HybridQuantizer.parse(section) == HybridQuantizer.parse("nvfp4|mxfp8@rowwise_dequantized")


@pytest.mark.feature("F28", "F33", "F34")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mxfp8@orignal", "columnwise_source is 'orignal' .did you mean 'original'"),
        ("nvfp4+rht|mxfp8@rowwise_dequantized", r"rowwise format nvfp4\+rht: with \+rht its decoded values are"),
        ("mxfp8|nvfp4+row_scaled", r"columnwise format nvfp4\+row_scaled: \+row_scaled is for rowwise"),
        ("nvfp4+row_scaled", "columnwise format"),
        ({"rowwise": "mxfp8"}, "'columnwise' is missing"),
        ({"rowwise": "mxfp8", "columnwize": "mxfp8"}, "unknown key 'columnwize' .did you mean 'columnwise'"),
        (8, "expected text"),
        ("nvfp4|", "unknown name ''"),
    ],
)
def test_wrong_quantizers(value, message):
    with pytest.raises(UserError, match=message):
        HybridQuantizer.parse(value)


def test_only_the_directions_asked_for_are_made():
    x, quantizer = draw("normal", 32, 64), HybridQuantizer.parse("nvfp4|mxfp8")
    only_row = quantizer.quantize(x, columnwise=None)
    only_column = quantizer.quantize(x, rowwise=None)
    assert only_row.columnwise is None and only_row.rowwise.shape == (32, 64)
    assert only_column.rowwise is None and only_column.columnwise.shape == (64, 32)


@pytest.mark.feature("F38", "F40")
@pytest.mark.parametrize("text", ["nvfp4|mxfp8", "mxfp8|nvfp4+rht", "fp8_current|fp8_block", "nvfp4+sr|nvfp4+sr"])
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_columnwise_source(text, source):
    x, quantizer = draw("heavy", 32, 64), HybridQuantizer.parse(f"{text}@{source}")
    both = quantizer.quantize(x, key=KEY)
    seen = both.rowwise.dequantize() if source == "rowwise_dequantized" else x
    again = HybridQuantizer(parse("bf16"), quantizer.columnwise).quantize(seen, key=KEY).columnwise
    for name, buffer in both.columnwise.buffers.items():
        assert torch.equal(buffer, again.buffers[name])
    if source == "rowwise_dequantized" and text != "mxfp8|nvfp4+rht":
        original = HybridQuantizer.parse(text).quantize(x, key=KEY).columnwise
        assert any(not torch.equal(b, original.buffers[n]) for n, b in both.columnwise.buffers.items())


@pytest.mark.parametrize("text", SOME)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_exact_is_the_operand_of_quantize(text, direction):
    x, quantizer = draw("heavy", 32, 64), HybridQuantizer.parse(text)
    wanted = {d: "exact" if d == direction else None for d in ("rowwise", "columnwise")}
    exact = getattr(quantizer.quantize(x, **wanted, key=KEY), direction)
    operand = getattr(quantizer.quantize(x, key=KEY), direction).operand()
    assert torch.equal(exact.matrix.float(), operand.matrix.float())
    assert exact.divisor == operand.divisor


def test_directions_draw_different_random_bits():
    x = draw("normal", 32, 32)
    x = x.triu() + x.triu(1).t()  # symmetric: only the key differs
    operands = HybridQuantizer.parse("nvfp4+sr").quantize(x, key=KEY)
    assert not torch.equal(operands.rowwise.buffers["q"], operands.columnwise.buffers["q"])


def test_flatten_gives_everything_back():
    operand = HybridQuantizer.parse("nvfp4").quantize(draw("normal", 16, 32)).rowwise
    tensors, skeleton = flatten(operand)
    again = unflatten(tensors, pickle.loads(pickle.dumps(skeleton)))
    assert torch.equal(again.dequantize(), operand.dequantize()) and again.dtype == torch.bfloat16
    assert operand.nbytes == 16 * 16 + 16 * 2 + 4


@pytest.mark.feature("T27")
def test_statistics_are_errors_against_the_original_values_in_both_directions():
    x = draw("normal", 64, 96)
    for text in ("nvfp4|mxfp8", "nvfp4|mxfp8@rowwise_dequantized", "bf16|nvfp4"):
        quantizer = HybridQuantizer.parse(text)
        operands, rows = quantizer.quantize(x), quantizer.statistics(x)
        for direction, source in (("rowwise", x), ("columnwise", x.t())):
            operand = getattr(operands, direction)
            wanted = gather(source, operand.format, operand.buffers).row()
            assert rows[direction]["sqnr_db"] == pytest.approx(wanted["sqnr_db"], abs=1e-3)
            assert rows[direction]["scale_max"] == pytest.approx(wanted["scale_max"], nan_ok=True)


class Named(HybridQuantizer):
    """A quantizer of somebody else."""


def test_keys_are_read_where_bits_are_drawn_and_in_classes_of_somebody_else():
    formats = parse("mxfp8"), parse("nvfp4+sr")
    assert not HybridQuantizer(formats[0], formats[0]).reads_key
    assert HybridQuantizer(formats[0], formats[1]).reads_key
    assert Named(formats[0], formats[0]).reads_key


@pytest.mark.parametrize(("text", "decodes"), [("mxfp8", True), ("fp8_block|mxfp8", True), ("nvfp4", False)])
def test_codes_that_are_sent_are_those_of_quantize(text, decodes):
    """With their exact operand where nothing is scaled by the whole matrix."""
    x, quantizer = draw("heavy", 64, 128, dtype=torch.bfloat16), HybridQuantizer.parse(text)
    sent, usual = quantizer.quantize_sent(x, "codes"), quantizer.quantize(x)
    for direction in ("rowwise", "columnwise"):
        ours, theirs = getattr(sent, direction).buffers, getattr(usual, direction).buffers
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert usual.rowwise_exact is None and (sent.rowwise_exact is not None) == decodes
    if decodes:
        assert torch.equal(sent.rowwise_exact.matrix, usual.rowwise.operand().matrix)
