"""A group is quantized as its members are one by one, and lies in packed buffers."""

from dataclasses import dataclass, replace

import pytest
import torch
from cases import FEW, HIGH, SAME, STATELESS, crossed

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.layout import GroupLayout
from hqsweep.ops.quantize.operators import Matrices, Wanted, allocations
from hqsweep.ops.splits import Splits
from hqsweep.quant import HybridQuantizer, Operand
from hqsweep.quant.group import homogeneous, quantize_group
from hqsweep.quant.operand import flatten, unflatten

SPLITS = (48, 0, 16, 176)
ROWS, WIDTH = sum(SPLITS), 96
KEYS = [RngKey(seed=3, slot=f"experts/{e}", step=5) for e in range(len(SPLITS))]


class Doubled(HybridQuantizer):
    """A quantizer of somebody else, with a quantize of its own."""

    def quantize(self, x, **options):
        return super().quantize(x * 2, **options)


def parts(x):
    return x.split(SPLITS)


def assert_same(group, members):
    assert len(group.members) == len(members)
    for ours, theirs in zip(group.members, members, strict=True):
        if isinstance(theirs, Operand):
            assert (ours.format, ours.shape, ours.dtype) == (theirs.format, theirs.shape, theirs.dtype)
            assert all(torch.equal(ours.buffers[name], theirs.buffers[name]) for name in theirs.format.layout)
        else:
            assert torch.equal(ours.matrix, theirs.matrix) and ours.divisor == theirs.divisor
            assert ours.matrix.stride() == theirs.matrix.stride() or not ours.matrix.numel()
            assert (ours.factor is None and theirs.factor is None) or torch.equal(ours.factor, theirs.factor)


@pytest.mark.feature("F73", "F85")
@pytest.mark.parametrize(("text", "output"), crossed(STATELESS, ["codes", "exact"]))
def test_members_are_those_of_single_calls(text, output):
    quantizer, x = HybridQuantizer.parse(text), draw("heavy", ROWS, WIDTH)
    group = quantize_group(x, Splits.of(SPLITS, ROWS), quantizer, rowwise=output, columnwise=output, keys=KEYS)
    alone = [
        quantizer.quantize(part, rowwise=output, columnwise=output, key=key)
        for part, key in zip(parts(x), KEYS, strict=True)
    ]
    assert_same(group.rowwise, [each.rowwise for each in alone])
    assert_same(group.columnwise, [each.columnwise for each in alone])


@pytest.mark.feature("F76")
@pytest.mark.parametrize("text", FEW)
def test_only_what_is_asked_for_is_made(text):
    quantizer, x, splits = HybridQuantizer.parse(text), draw("heavy", ROWS, WIDTH), Splits.of(SPLITS, ROWS)
    both = quantize_group(x, splits, quantizer)
    row, column = (quantize_group(x, splits, quantizer, **{skipped: None}) for skipped in ("columnwise", "rowwise"))
    assert row.columnwise is None and column.rowwise is None
    assert_same(row.rowwise, both.rowwise.members)
    assert_same(column.columnwise, both.columnwise.members)


def capacity(format, sizes, width, columnwise):
    """Buffer -> entries that the kernel makes room for where it does not know the sizes; {} without a kernel."""
    matrices, wanted = Matrices(sum(sizes), width, len(sizes)), Wanted(format.text, columnwise, False, False)
    outputs = allocations(matrices, wanted, False)
    return {name: count for name, ((count,), _) in zip(format.layout, outputs, strict=True)}


@pytest.mark.feature("F73", "F85")
@pytest.mark.parametrize("text", STATELESS)
def test_packed_buffers_are_compact_and_fit_the_capacity(text):
    """Members are views that follow each other; no buffer is larger than any splits of as many rows can need."""
    quantizer, x = HybridQuantizer.parse(text), draw("heavy", ROWS, WIDTH)
    operands = quantize_group(x, Splits.of(SPLITS, ROWS), quantizer, keys=KEYS)
    for group, columnwise in ((operands.rowwise, False), (operands.columnwise, True)):
        room = capacity(group.format, SPLITS, WIDTH, columnwise)
        for name, flat in group.buffers.items():
            address = flat.data_ptr()
            for member in group.members:
                own = member.buffers[name]
                assert own.data_ptr() == address or not own.numel()
                address += own.nbytes
            assert address == flat.data_ptr() + flat.nbytes and flat.numel() <= room.get(name, flat.numel())
        tensors, skeleton = flatten(group)
        assert_same(unflatten(tensors, skeleton), group.members)


def test_capacity_is_reached_by_the_worst_splits_but_for_less_than_one_block_an_expert():
    splits = Splits.of((1, 33, 1, 65), 100)  # 1 + 2 + 1 + 3 blocks of 32
    layout = GroupLayout(splits=splits, width=8, columnwise=True)
    format = HybridQuantizer.parse("mxfp8").columnwise
    assert sum(rows * cols for rows, cols in layout.buffer_shapes(format, "s")) == 7 * 8
    assert capacity(format, splits.sizes, 8, True) == {"q": 800, "s": (3 + 4) * 8}


@pytest.mark.feature("F78")
def test_a_quantizer_with_a_quantize_of_its_own_is_called_for_each_expert():
    quantizer, x = HybridQuantizer.parse("mxfp8"), draw("heavy", ROWS, WIDTH)
    custom = Doubled(quantizer.rowwise, quantizer.columnwise)
    group = quantize_group(x, Splits.of(SPLITS, ROWS), custom, columnwise="exact")
    alone = [custom.quantize(part, columnwise="exact") for part in parts(x)]
    assert_same(group.rowwise, [each.rowwise for each in alone])
    assert_same(group.columnwise, [each.columnwise for each in alone])
    assert_same(group.rowwise, [quantizer.quantize(part * 2).rowwise for part in parts(x)])


def test_errors_name_the_expert():
    x = draw("normal", 20, 32)
    with pytest.raises(UserError, match=r"expert 1: .*takes a multiple of 16 rows"):
        quantize_group(x, Splits.of((16, 4), 20), HybridQuantizer.parse("nvfp4"))
    with pytest.raises(UserError, match=r"negative"):
        Splits.of((24, -4), 20)
    with pytest.raises(UserError, match=r"adds up to 24 rows, and the matrix has 20"):
        Splits.of((16, 8), 20)
    with pytest.raises(UserError, match=r"m_splits is torch.float32"):
        Splits.of(torch.tensor([20.0]), 20)


@pytest.mark.parametrize(
    "text",
    [t for t in STATELESS if t in SAME and t not in HIGH and not {"sr", "eden", "ue5m3"} & set(t.split("+"))],
)
def test_blocks_start_again_at_each_expert(text):
    """The last rows of one expert do not move the first block of the next."""
    quantizer, x = HybridQuantizer.parse(text), draw("normal", 80, 32)
    louder = x.clone()
    louder[:16] *= 1000
    a, b = (quantize_group(v, Splits.of((16, 64), 80), quantizer).columnwise.members[1] for v in (x, louder))
    assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
    one = [quantizer.quantize(v).columnwise.dequantize()[:, 16:] for v in (x, louder)]
    assert not torch.equal(*one)  # as one matrix they share blocks, or an amax


def test_keys_are_those_of_the_experts():
    quantizer, x = HybridQuantizer.parse("nvfp4+sr"), draw("normal", 32, 32).repeat(2, 1)
    splits = Splits.of((32, 32), 64)
    same = quantize_group(x, splits, quantizer, keys=[KEYS[0], KEYS[0]]).rowwise.members
    other = quantize_group(x, splits, quantizer, keys=[KEYS[0], replace(KEYS[0], slot="other")]).rowwise.members
    assert torch.equal(same[0].buffers["q"], same[1].buffers["q"])
    assert not torch.equal(other[0].buffers["q"], other[1].buffers["q"])


ANY_ROWS = [text for text in STATELESS if HybridQuantizer.parse(text).columnwise.column_multiple == 1]


@pytest.mark.parametrize(
    ("text", "splits"),
    crossed(STATELESS, [SPLITS, (64, 64, 64, 64)]) + [(text, (24, 24, 24, 24)) for text in ANY_ROWS],
    ids=str,
)
def test_exact_operands_of_codes_are_those_of_the_members(text, splits):
    """In one memory; of rows, and of members of equal rows, without a call for each expert."""
    rows, quantizer = sum(splits), HybridQuantizer.parse(text)
    operands = quantize_group(draw("heavy", rows, WIDTH), Splits.of(splits, rows), quantizer, keys=KEYS)
    for group in (operands.rowwise, operands.columnwise):
        exact, alone = group.operand(), [member.operand() for member in group.members]
        for own, expected in zip(exact.members, alone, strict=True):
            assert torch.equal(own.matrix, expected.matrix) and own.divisor == expected.divisor
            assert (own.factor is None) == (expected.factor is None)
            assert own.factor is None or torch.equal(own.factor, expected.factor)


MXFP8 = HybridQuantizer.parse("mxfp8")


@dataclass(frozen=True)
class Scaled(HybridQuantizer):
    """A quantizer of somebody else."""

    factor: float = 1.0


def scaled(factor):
    return Scaled(parse("mxfp8"), parse("mxfp8"), factor=factor)


@pytest.mark.feature("F74", "F77", "F84")
@pytest.mark.parametrize(
    ("first", "other", "difference"),
    [
        (MXFP8, scaled(1.0), r"the kind of quantizer \(Scaled and HybridQuantizer\)"),
        (scaled(1.0), scaled(2.0), "its fields"),
        (MXFP8, HybridQuantizer.parse("mxfp8|bf16"), "high precision of its columnwise operand"),
        (MXFP8, HybridQuantizer.parse("fp8_block|mxfp8"), "the family of its rowwise operand"),
        (MXFP8, HybridQuantizer.parse("mxfp8|mxfp8+2d"), "the options of its columnwise operand"),
        (MXFP8, HybridQuantizer.parse("mxfp8+e5m2|mxfp8"), "the options of its rowwise operand"),
        (MXFP8, HybridQuantizer.parse("mxfp8@rowwise_dequantized"), "columnwise_source"),
    ],
)
def test_what_differs_is_named(first, other, difference):
    with pytest.raises(UserError, match=rf"^here: input of expert 2 differs from that of expert 0 in {difference}: "):
        homogeneous([first, first, other], "here: input")


def test_equal_quantizers_are_one():
    """Also where each was parsed by itself; states of delayed scaling are no part of them."""
    for text in ("fp8_delayed|mxfp8", "nvfp4+sr", "bf16|nvfp4@rowwise_dequantized"):
        quantizers = [HybridQuantizer.parse(text) for _ in range(3)]
        assert homogeneous(quantizers, "here: input") is quantizers[0]
    assert homogeneous([scaled(2.0), scaled(2.0)], "here: input").factor == 2.0
