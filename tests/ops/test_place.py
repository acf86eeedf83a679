"""A part of a matrix draws the random bits that the whole draws there, in the reference and in the kernels."""

import pytest
import torch
from cases import RANDOM, STOCHASTIC_PAIRS, crossed

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.quantize.amax import Search, find_amax
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.shards.shard_agree import operand_of_area
from hqsweep.parallel.wire.exchange import Area
from hqsweep.quant.operand import Operand

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
backends = pytest.mark.parametrize("backend", ["reference", "auto"])
KEY = RngKey(seed=7, slot="test", step=2**40 + 3)
WHOLE = Area(0, 192, 0, 320)
PARTS = [Area(16, 176, 0, 320), Area(32, 192, 64, 256), Area(48, 64, 16, 32), Area(64, 64, 0, 320)]
PAIRS = [pair for pair in STOCHASTIC_PAIRS if all(parse(text).tile[1] <= 16 for text in pair)] + [
    ("fp8_current", RANDOM)
]
"""Formats whose blocks no part cuts."""


def both(x, area, pair, backend, grids, **options):
    place = Place.of(area, WHOLE.shape)
    formats = dict(zip(("rowwise", "columnwise"), map(parse, pair), strict=True))
    keys = {d: place.key(KEY.under(d), d) for d in formats}
    targets = [Target(format, key=keys[d], grid=grids.get(d)) for d, format in formats.items()]
    operands = quantize(x, *targets, backend=backend, **options)
    shapes = {"rowwise": tuple(x.shape), "columnwise": tuple(x.shape)[::-1]}
    return {
        d: Operand(format=formats[d], shape=shapes[d], dtype=x.dtype, buffers=getattr(operands, d)) for d in formats
    }


def grids_of(operands, x, area):
    """The amaxes of the whole, by which parts are encoded: one, or those of the part's rows."""
    grids = {}
    for direction, operand in operands.items():
        format, view = operand.format, x if direction == "rowwise" else x.t()
        if format.amax_name:
            amax = torch.zeros(len(view) if format.row_scaled else 1, 1, device=x.device)
            find_amax(view, Search(format, amax, key=KEY))
            rows = area[:2] if direction == "rowwise" else area[2:]
            grids[direction] = {format.amax_name: amax[slice(*rows)] if format.row_scaled else amax}
    return grids


@pytest.mark.feature("F109", "F113")
@devices
@pytest.mark.parametrize(
    ("pair", "backend", "dtype", "turned"),
    crossed(PAIRS, ["reference", "auto"], [torch.bfloat16, torch.float32], [False, True], whole=PAIRS[:1] + PAIRS[-1:]),
    ids=str,
)
def test_parts_draw_the_bits_of_the_whole(device, backend, dtype, pair, turned):
    x = draw("normal", *WHOLE.shape, dtype=dtype).to(device)
    x = x.t().contiguous().t() if turned else x
    whole = both(x, WHOLE, pair, backend, {})
    plain = quantize(
        x, *(Target(parse(f), key=KEY.under(d)) for f, d in zip(pair, whole, strict=True)), backend=backend
    )
    for direction, operand in whole.items():
        assert all(torch.equal(t, getattr(plain, direction)[name]) for name, t in operand.buffers.items())
    for area in PARTS:
        part = both(area.of(x, WHOLE), area, pair, backend, grids_of(whole, x, area))
        for direction, operand in part.items():
            wanted = operand_of_area(whole[direction], direction, WHOLE, area)
            for name, buffer in operand.buffers.items():
                assert torch.equal(buffer, wanted.buffers[name]), (area, direction, name)


@devices
@backends
def test_columns_of_decoded_rows(device, backend):
    """The random bits of the rows decide what the columns are made from, and their amax."""
    pair, area = ("nvfp4+sr", "nvfp4"), PARTS[1]
    x = draw("normal", *WHOLE.shape).to(device)
    whole = both(x, WHOLE, pair, backend, {}, columnwise_source="rowwise_dequantized")
    grids = {d: {"g": operand.buffers["g"]} for d, operand in whole.items()}
    part = both(area.of(x, WHOLE), area, pair, backend, grids, columnwise_source="rowwise_dequantized")
    wanted = operand_of_area(whole["columnwise"], "columnwise", WHOLE, area)
    assert all(torch.equal(part["columnwise"].buffers[name], t) for name, t in wanted.buffers.items())
    rest = torch.zeros(1, 1, device=device)
    for columns in (Area(0, 192, 0, 160), Area(0, 192, 160, 320)):
        key = Place.of(columns, WHOLE.shape).key(KEY.under("rowwise"), "rowwise")
        rows = Search(parse("nvfp4+sr"), None, grids["rowwise"]["g"], key)
        source = {"columnwise_source": "rowwise_dequantized", "backend": backend}
        find_amax(columns.of(x, WHOLE), rows, Search(parse("nvfp4"), rest), **source)
    assert torch.equal(rest, grids["columnwise"]["g"])


def test_a_part_that_cuts_a_draw_is_refused():
    with pytest.raises(ValueError, match="column 8 of 320 columns cuts the random bytes of one draw"):
        both(torch.zeros(16, 32), Area(0, 16, 8, 40), ("nvfp4+sr", "mxfp8"), "auto", {})
