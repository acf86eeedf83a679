"""Transforms of 32, 64 and 128 elements: kernels and reference give the same bytes, for a matrix and for members."""

import pytest
import torch
from cases import WIDE, crossed

from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.jobs.parity.job import gathered, outcomes
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.splits import Splits

KEY = RngKey(seed=5, slot="wide", step=2**33 + 1)
DISTRIBUTIONS = ("normal", "heavy", "tiny", "zeros", "spike", "nonfinite")
SIZES = (128, 0, 256, 384)
SHORT = ("nvfp4+rht64", "mxfp4+rht32", "nvfp4+tensor+rht128", "nvfp4+rht128+eden")
"""Texts that meet every distribution; each other text meets one."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.cpu().contiguous() for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@devices
@pytest.mark.parametrize(("text", "distribution"), crossed(WIDE, DISTRIBUTIONS, whole=SHORT))
def test_every_output_of_a_matrix(text, distribution, device):
    """Codes, amaxes, exact operands, decoded values; of rows that are padded, of columns, and of float32."""
    format = parse(text)
    x = draw(distribution, 256, 384, dtype=torch.float32 if DISTRIBUTIONS.index(distribution) % 2 else torch.bfloat16)
    padded = torch.zeros(256, 400, dtype=x.dtype, device=device)[:, :384].copy_(x)
    turned = x.t().contiguous().to(device).t()
    expected = outcomes(format, x, KEY, "reference")
    for source in (padded, turned):
        actual = outcomes(format, source, KEY, "kernel")
        assert actual.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not same(actual[name], tensor)] == []


@devices
@pytest.mark.parametrize("text", WIDE)
def test_statistics(text, device):
    x = draw("heavy", 256, 128)
    expected, actual = (gathered(parse(text), x.to(d), KEY, b) for d, b in (("cpu", "reference"), (device, "kernel")))
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name].cpu(), tensor.cpu(), rtol=1e-4, atol=1e-30, msg=name)


@devices
@pytest.mark.parametrize("text", WIDE)
def test_members_in_one_call(text, device):
    x, format = draw("heavy", sum(SIZES), 256).to(device), parse(text)
    keys = [RngKey(seed=5, slot=f"{e}", step=9) for e in range(len(SIZES))]
    together = Target(format, key=keys)
    packed = quantize(x, together, together, splits=Splits.of(SIZES, len(x)), backend="kernel")
    parts = [
        quantize(part, Target(format, key=key), Target(format, key=key), backend="kernel")
        for part, key in zip(x.split(SIZES), keys, strict=True)
    ]
    for direction in ("rowwise", "columnwise"):
        for name, buffer in getattr(packed, direction).items():
            own = torch.cat([getattr(part, direction)[name].flatten() for part in parts])
            assert same(buffer.flatten()[: len(own)], own), (direction, name)
