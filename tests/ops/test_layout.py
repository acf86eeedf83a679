"""Where the members of a group lie in packed buffers."""

import pytest
import torch
from cases import REPRESENTATIVE, crossed
from support.golden.golden_cases import (
    DIRECTIONS,
    FEW_QUANTIZER_CASES,
    Arrays,
    as_matrix,
    check_encoded,
    directions,
    format_of,
    golden_buffers,
)
from support.ops.calls import quantize

from hqsweep.formats import parse
from hqsweep.formats.inputs import draw
from hqsweep.ops.layout import GroupLayout, member_buffers
from hqsweep.ops.splits import Splits


@pytest.mark.feature("F140")
@pytest.mark.parametrize(("text", "columnwise", "kernel"), crossed(REPRESENTATIVE, [False, True], [False, True]))
def test_starts_are_where_the_members_buffers_begin(text, columnwise, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setattr("hqsweep.ops.splits.has_kernels", lambda _: False)
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


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.feature("F73", "F85", "A28")
@devices
@pytest.mark.parametrize("case", FEW_QUANTIZER_CASES, ids=lambda case: case["id"])
def test_an_expert_among_others_has_the_golden_bytes(case, device):
    """Louder experts before it and after, and empty ones; the splits known to the host, or to the device alone."""
    arrays = Arrays(case)
    x, formats = as_matrix(arrays.raw(case["input_key"])), {d: format_of(case, d) for d in directions(arrays)}
    loud = draw("normal", 80, x.shape[1]).to(x.dtype) * 1024
    sizes = (0, 32, len(x), 0, 48)
    together = torch.cat([loud[:32], x, loud[32:]]).to(device)
    on_device = torch.tensor(sizes, dtype=torch.int32, device=device)
    for splits in (
        Splits.of(sizes, len(together)),
        Splits(rows=len(together), count=5, sizes=None, device_sizes=on_device),
    ):
        operands = quantize(together, *(formats.get(direction) for direction in DIRECTIONS), splits=splits)
        for direction, format in formats.items():
            layout = GroupLayout.of(splits, x.shape[1], columnwise=direction == "columnwise")
            own = member_buffers(getattr(operands, direction), format, layout)[2]
            got = {name: buffer.cpu() for name, buffer in own.items()}
            golden = golden_buffers(case, arrays, direction, format, *layout.shapes[2])
            check_encoded(case, arrays, direction, got, golden)
