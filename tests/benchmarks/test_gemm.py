"""benchmarks/gemm.py: scales in the layouts that torch recognises, and the product they stand for."""

import pytest
import torch

from benchmarks import gemm, rows


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """The helpers build tensors on the GPU; here they build them on the CPU."""
    for name in ("full", "randint", "randn"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, **k: make(*a, **k | {"device": "cpu"}))


@pytest.mark.parametrize("layout", gemm.LAYOUTS)
def test_a_scale_covers_its_operand(layout):
    scale = gemm.scale_of(layout, 200, 320)
    values = gemm.expand(scale, layout, 200, 320).expand(200, 320)
    strides = {"tensor": (), "row": (1, 1), "1x128": (1, 200), "128x128": (4, 1)}
    assert scale.stride() == strides[layout]
    tile = {"tensor": (200, 320), "row": (1, 320), "1x128": (1, 128), "128x128": (128, 128)}[layout]
    for r, c in ((0, 0), (128, 128), (199, 256)):
        assert (
            values[r : r // tile[0] * tile[0] + tile[0], c : c // tile[1] * tile[1] + tile[1]] == values[r, c]
        ).all()


def test_the_product_beside_is_that_of_the_scaled_operands():
    _, exact = gemm.scaled_call((32, 48, 256), (gemm.E4M3, gemm.E5M2), ("1x128", "tensor"), torch.float32, False)
    assert exact().shape == (32, 48) and exact().dtype == torch.float64 and exact().isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("section", gemm.SECTIONS)
def test_sections_run_on_a_gpu(section, tmp_path, monkeypatch):
    monkeypatch.undo()
    args = type("Args", (), {"out": tmp_path / "rows", "commit": "abc"})
    monkeypatch.setattr(gemm, "LARGE", (256, 256, 512))
    writer, clock = rows.Writer("gemm", "cuda", args), gemm.Cuda(2)
    getattr(gemm, f"measure_{section}")(writer, clock)
    assert any("error" not in row for row in writer.rows)
