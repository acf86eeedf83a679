"""Experts of a group have the bytes that TransformerEngine gives them alone (tests/golden)."""

import pytest
import torch
from support.golden.golden_cases import (
    DIRECTIONS,
    QUANTIZER_CASES,
    Arrays,
    as_matrix,
    check_encoded,
    directions,
    format_of,
    golden_buffers,
)
from support.ops.calls import quantize

from hqsweep.formats.inputs import draw
from hqsweep.ops.members.layout import GroupLayout
from hqsweep.ops.members.packed import member_buffers
from hqsweep.ops.members.splits import Splits

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("case", QUANTIZER_CASES, ids=lambda case: case["id"])
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
