"""Where a shard lies in its whole, what its operands encode, and what it says of itself."""

import pickle

import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.parallel.wire.exchange import Area, areas_of_interval
from hqsweep.quant import (
    GroupedTensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    Place,
    quantize_master_weights,
    quantize_shards_,
)

PLACE = Place(37, 0, 200, 96)


@pytest.mark.parametrize(
    ("text", "direction", "rows", "columns"),
    [
        ("bf16", "columnwise", (37, 101), (0, 96)),
        ("fp8_current", "rowwise", (37, 101), (0, 96)),
        ("mxfp8", "rowwise", (37, 101), (0, 96)),
        ("mxfp8", "columnwise", (32, 128), (0, 96)),
        ("mxfp4", "columnwise", (32, 128), (0, 96)),
        ("nvfp4", "columnwise", (32, 112), (0, 96)),
        ("nvfp4+row_scaled", "rowwise", (37, 101), (0, 96)),
        ("nvfp4+2d", "rowwise", (32, 112), (0, 96)),
        ("nvfp4+tensor+sr", "columnwise", (32, 112), (0, 96)),
        ("fp8_block+2d", "rowwise", (0, 128), (0, 96)),
        ("fp8_block", "columnwise", (0, 128), (0, 96)),
    ],
)
def test_cover_by_hand(text, direction, rows, columns):
    format = parse(text)
    assert PLACE.cover(format, direction, 64) == rows
    assert PLACE.cover_columns(format, direction, 96) == columns
    assert PLACE.cover(format, direction, 0) == (37, 37)


def test_covers_end_with_the_whole_and_take_whole_blocks_of_columns():
    assert Place(190, 0, 200, 96).cover(parse("fp8_block+2d"), "rowwise", 10) == (128, 200)
    assert Place(0, 20, 200, 96).cover_columns(parse("mxfp8"), "rowwise", 30) == (0, 64)
    assert Place(0, 20, 200, 96).cover_columns(parse("mxfp8"), "columnwise", 30) == (20, 50)
    sources = PLACE.sources([(parse("mxfp8+2d"), "rowwise"), (parse("nvfp4"), "columnwise")], (64, 96))
    assert sources == Area(32, 128, 0, 96)


def test_flat_intervals_are_three_areas_at_most():
    whole = torch.arange(12 * 7).view(12, 7)
    for start in range(0, 84, 5):
        for stop in range(start, 85, 3):
            areas = areas_of_interval(start, stop, 7)
            assert len(areas) <= 3
            parts = [area.of(whole, Area(0, 12, 0, 7)).flatten() for area in areas]
            assert torch.equal(torch.cat([*parts, whole.flatten()[:0]]), whole.flatten()[start:stop])


def shard(text: str, rows: int, place: Place, **options) -> HybridQuantizedTensor:
    return HybridQuantizedTensor.empty((rows, 96), HybridQuantizer.parse(text), place=place, **options)


def test_a_shard_that_cuts_nothing_needs_no_group():
    x, key = torch.randn(192, 96).bfloat16(), RngKey(seed=1, slot="w", step=4)
    quantizer = HybridQuantizer.parse("nvfp4+row_scaled|mxfp8")
    whole = HybridQuantizedTensor.quantize(x, quantizer, key=key)
    part = shard(str(quantizer), 64, Place(32, 0, 192, 96)).quantize_(x[32:96], key=key)
    assert torch.equal(part.dequantize(), whole.dequantize()[32:96])
    assert torch.equal(part.columnwise.buffers["s"], whole.columnwise.buffers["s"][:, 1:3])


def test_a_shard_says_where_it_lies_and_outlives_a_file():
    part = shard("mxfp8|mxfp8+2d", 64, PLACE)
    assert part.rowwise.shape == (64, 96) and part.columnwise.shape == (96, 96) and part.shape == (64, 96)
    for buffer in part.buffers.values():
        buffer.zero_()
    again = pickle.loads(pickle.dumps(part))
    assert again.metadata == part.metadata and again.metadata.place == PLACE
    assert again.dequantize().shape == (64, 96)
    assert "place" not in shard("mxfp8", 200, None).describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shard("mxfp8", 180, PLACE), r"a shard \(180, 96\) at row 37 and column 0 does not lie in a whole of"),
        (lambda: shard("nvfp4", 64, PLACE), "takes? a multiple|contracted axis has 200 elements"),
        (
            lambda: GroupedTensor.empty([(2, 32), (4, 32)], HybridQuantizer.parse("mxfp8"), place=PLACE),
            r"a shard of a group .*its members are whole",
        ),
        (
            lambda: shard("mxfp8+2d", 64, PLACE).quantize_(torch.zeros(64, 96)),
            "needs what it does not hold; give group=",
        ),
        (lambda: shard("fp8_current", 64, PLACE).quantize_(torch.zeros(64, 96)), "shares an amax with the rest; give"),
        (lambda: shard("mxfp8", 64, PLACE).quantize_(torch.zeros(63, 96)), r"got \(63, 96\) for a tensor of shape"),
        (
            lambda: quantize_master_weights([shard("mxfp8", 200, None)], [torch.zeros(96)], [200 * 96 - 95]),
            r"master 0 is \(96,\) at offset 19105; it takes a flat fragment that lies within the 19200 elements",
        ),
        (
            lambda: quantize_master_weights([shard("mxfp8", 200, None)], [torch.zeros(96)], [0]),
            "needs what it does not hold; give group=",
        ),
        (
            lambda: HybridQuantizer.parse("mxfp8").quantize(torch.zeros(32, 96), place=PLACE, splits=object()),
            "a place is that of one matrix",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_quantizer_of_its_own_kind_writes_no_part():
    class Other(HybridQuantizer):
        def quantize(self, *args, **kwargs):
            return super().quantize(*args, **kwargs)

    part = HybridQuantizedTensor.empty((64, 96), Other(parse("bf16"), parse("bf16")), place=PLACE)
    with pytest.raises(UserError, match="cannot be quantized by Other, whose quantize is its own"):
        part.quantize_(torch.zeros(64, 96))


def test_wholes_among_shards_and_meta_tensors_are_written_too():
    whole, x = shard("mxfp8", 200, None), torch.randn(200, 96).bfloat16()
    meta = shard("mxfp8|nvfp4+sr", 64, Place(32, 0, 208, 96), device="meta", key=RngKey(seed=0, slot="w", step=3))
    quantize_shards_([whole, meta], [x, x[:64]])
    assert torch.equal(whole.dequantize(), HybridQuantizedTensor.quantize(x, whole.quantizer).dequantize())
    assert meta.metadata.key.step == 4


def test_one_process_writes_whole_masters():
    x = torch.randn(200, 96)
    weight = shard("mxfp8", 200, None)
    quantize_master_weights([weight], [x.flatten()], [0])
    assert torch.equal(weight.dequantize(), HybridQuantizedTensor.quantize(x.bfloat16(), weight.quantizer).dequantize())
