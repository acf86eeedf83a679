"""Parts of a matrix that are of several pieces have the bytes of the whole; tests/parallel has parts over ranks."""

from types import SimpleNamespace

import pytest
from cases import STATELESS, fitting
from support.ops.statistics import assert_same_row

from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.parallel.shards.shard_part import Part, part_sums, quantize_part
from hqsweep.quant import HybridQuantizer

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""What Part takes for a process group of this process alone, whose part is the whole."""
TEXTS = [
    "nvfp4+row_scaled|nvfp4+sr",
    "nvfp4+row_scaled|nvfp4+sr@rowwise_dequantized",
    "nvfp4+sr|nvfp4+sr@rowwise_dequantized",
]
"""Rows with amaxes of their own, and random bits, beside random bits in columns: draws go on from piece to piece."""


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("text", [*fitting(STATELESS, 32), *TEXTS])
def test_a_part_of_two_pieces_is_the_whole_that_it_makes_up(text, axis):
    quantizer, key = HybridQuantizer.parse(text), RngKey(seed=1, slot="x", step=2)
    x, part = draw("row_scaled", 128, 64, 3), Part(group=ALONE, axis=axis, runs=2)
    outputs = {"rowwise": "codes", "columnwise": "codes", "key": key}
    whole, of_part = quantizer.quantize(x, **outputs), quantize_part(quantizer, x, part, **outputs)
    for direction in ("rowwise", "columnwise"):
        expected, own = getattr(whole, direction).buffers, getattr(of_part, direction).buffers
        assert {name: buffer.tolist() for name, buffer in own.items()} == {n: b.tolist() for n, b in expected.items()}
    expected, own = quantizer.sums(x, key), part_sums(quantizer, x, part, key)
    for direction, sums in own.items():
        assert_same_row(sums.row(), expected[direction].row(), rel=1e-6, abs=1e-6)
