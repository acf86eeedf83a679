"""Statistics of a matrix in chunks are those of the whole."""

import pytest
import torch
from cases import KERNEL_PAIRS
from support.ops.calls import quantize
from support.ops.statistics import assert_same_row

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.jobs.probe.job import stream_statistics


@pytest.mark.parametrize("name", ["heavy", "spike", "zeros"])
@pytest.mark.parametrize(
    "texts",
    [texts for texts in KERNEL_PAIRS if not any(parse(text).stochastic for text in texts)],
    ids="|".join,
)
def test_chunks_give_the_statistics_of_the_whole(texts, name):
    x, formats = draw(name, 416, 208), tuple(map(parse, texts))
    whole = quantize(x, *formats, statistics=True)
    statistics = stream_statistics(lambda: x.split(128), *formats)
    for direction in ("rowwise", "columnwise"):
        expected = getattr(whole, f"{direction}_statistics").row()
        assert_same_row(statistics[direction], expected)


def test_stochastic_rounding_has_the_error_of_the_whole():
    x, format = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)), parse("nvfp4+sr")
    statistics = stream_statistics(lambda: x.split(128), format, format, RngKey(seed=0, slot="s", step=0))
    assert statistics["rowwise"]["sqnr_db"] == pytest.approx(17.25, abs=0.1)
