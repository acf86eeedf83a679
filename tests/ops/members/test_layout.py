"""Where the members of a group lie in packed buffers."""

import pytest
import torch
from cases import REPRESENTATIVE

from hqsweep.formats import parse
from hqsweep.ops.members.layout import GroupLayout
from hqsweep.ops.members.splits import Splits


@pytest.mark.feature("F140")
@pytest.mark.parametrize("text", REPRESENTATIVE)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_starts_are_where_the_members_buffers_begin(text, columnwise, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr("hqsweep.ops.members.splits.has_kernels", lambda _: False)
    layout = GroupLayout(splits=Splits.of((48, 0, 16, 176), 240), width=96, columnwise=columnwise)
    format = parse(text)
    starts = layout.starts(format, torch.device("cpu"))
    assert list(starts) == list(format.layout)
    for name, offsets in starts.items():
        sizes = [rows * cols for rows, cols in layout.buffer_shapes(format, name)]
        assert offsets.dtype == torch.int64 and offsets.diff().tolist() == sizes and offsets[0] == 0


@pytest.mark.gpu
def test_starts_on_a_gpu_are_those_on_the_cpu():
    for columnwise in (False, True):
        layout = GroupLayout(splits=Splits.of((48, 0, 16, 176), 240), width=96, columnwise=columnwise)
        for text in ("mxfp8", "nvfp4+row_scaled"):
            ours, theirs = (layout.starts(parse(text), torch.device(d)) for d in ("cuda", "cpu"))
            assert all(torch.equal(ours[name].cpu(), theirs[name]) for name in theirs)
