"""Rows at places that only the device knows, beside torch's own indexing."""

import pytest
import torch

from hqsweep.ops.rows import copy_rows

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.uint8, 48), (torch.float32, 3)])
def test_rows_go_where_the_index_says(device, dtype, width):
    rows = torch.randint(0, 200, (9, width), device=device).to(dtype)
    index = torch.tensor([8, -1, 0, 0, -1, 3, 7], device=device)
    out = torch.full((7, width), 77, device=device).to(dtype)
    copy_rows(rows, index, out)
    expected = [77 if i < 0 else rows[i].tolist() for i in index.tolist()]
    assert out.tolist() == [row if isinstance(row, list) else [row] * width for row in expected]


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_change_nothing(device):
    out = torch.ones(3, 16, device=device)
    copy_rows(out[:0], torch.full((3,), -1, device=device), out)
    assert out.eq(1).all()
