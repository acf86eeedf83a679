"""Stochastic rounding: unbiased to 4 standard errors, and the same bits wherever and in any order they are drawn."""

import pytest
import torch
from cases import ALL, EVERY_OPTION, WIDE, crossed
from support.fuzz.fuzz_cases import differences
from support.ops.calls import quantize

from hqsweep.formats import RngKey, parse
from hqsweep.formats.elements import E2M1

SR = parse("nvfp4+sr")
KEYS, ROWS = 128, 16
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BACKENDS = [("reference", "cpu"), ("kernel", "cpu"), pytest.param("kernel", "cuda", marks=pytest.mark.gpu)]
backends = pytest.mark.parametrize(("backend", "device"), BACKENDS)


def key(number: int) -> RngKey:
    return RngKey(seed=11, slot="layers.0/grad_output/rowwise", step=number)


def between_codes() -> tuple[torch.Tensor, torch.Tensor]:
    """All 256 fractions of all 7 steps of E2M1, both signs, and the probability of rounding away from zero."""
    fraction = torch.arange(256) / 256
    values = (CODES[:-1, None] + fraction * CODES.diff()[:, None]).flatten()
    return torch.cat([values, -values]), fraction.repeat(14)


def unit_scale_blocks(values: torch.Tensor) -> torch.Tensor:
    """A row whose blocks have scale 1: each holds 15 values and a 6, and the tensor's amax is 2688 = 6 * 448."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 15)).view(-1, 15)
    blocks = torch.cat([torch.full((len(blocks), 1), 6.0), blocks], dim=1)
    return torch.cat([torch.tensor([2688.0] + [0.0] * 15), blocks.flatten()])


@pytest.mark.feature("F21", "F23", "F24", "F25", "F26")
@backends
def test_unbiased_to_four_standard_errors(backend, device):
    values, probability = between_codes()
    x = unit_scale_blocks(values).repeat(ROWS, 1).to(device)
    total = torch.zeros(len(values), dtype=torch.float64)
    for number in range(KEYS):
        operands = quantize(x, SR, None, rowwise_key=key(number), backend=backend).rowwise
        assert (SR.scales(operands)[:, 1:] == 1).all()
        decoded = E2M1.decode(SR.codes(operands)).view(ROWS, -1, 16)[:, 1:, 1:].flatten(1)[:, : len(values)]
        total += decoded.double().sum(0).cpu()
    step = CODES.diff().double().repeat_interleave(256).repeat(2)
    variance = (probability * (1 - probability)).double() / (KEYS * ROWS)
    error = (total / (KEYS * ROWS) - values.double()) / step
    assert (error[variance == 0] == 0).all()  # a value that has a code keeps it
    for chosen in (slice(None), *(slice(256 * i, 256 * (i + 1)) for i in range(14))):
        assert error[chosen].mean().abs() <= 4 * variance[chosen].sum().sqrt() / error[chosen].numel(), chosen
    z2 = (error.square() / variance)[variance > 0]
    assert (z2.mean() - 1).abs() <= 4 * (2 / len(z2)) ** 0.5  # each fraction has its own probability, not only the mean


MATRIX = (48, 112)


def matrix(device: str = "cpu") -> torch.Tensor:
    x = torch.randn(MATRIX, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[0, 0] = 40.0  # the amax of every part that holds the first row
    return x.to(device)


STOCHASTIC = [text for text in ALL if parse(text).stochastic and parse(text).column_multiple == 16]
"""Formats whose random bits and transforms come by 16 elements."""
FEW_STOCHASTIC = [text for text in STOCHASTIC if text in EVERY_OPTION]


@backends
@pytest.mark.parametrize("text", FEW_STOCHASTIC)
def test_bits_depend_on_key_and_element_and_not_on_the_layout(text, backend, device):
    format, x = parse(text), matrix(device)
    call = {"columnwise_key": key(3), "backend": backend}
    alone = quantize(x.t().contiguous(), format, None, rowwise_key=key(3), backend=backend).rowwise
    columnwise = [
        quantize(x, None, format, **call).columnwise,
        quantize(x.t().contiguous().t(), None, format, **call).columnwise,
        quantize(torch.cat([x, x], 1)[:, : MATRIX[1]], None, format, **call).columnwise,
        quantize(x, format, format, rowwise_key=key(4), **call).columnwise,
        quantize(x, parse("mxfp8"), format, **call).columnwise,
    ]
    for got in columnwise:
        assert differences(got, {name: buffer.cpu() for name, buffer in alone.items()}) == []


@backends
@pytest.mark.parametrize("rows", [16, 32])
def test_bits_do_not_depend_on_the_rows_below(rows, backend, device):
    x = matrix(device)
    whole, part = (quantize(part, SR, None, rowwise_key=key(0), backend=backend).rowwise for part in (x, x[:rows]))
    assert differences({n: b[:rows] for n, b in whole.items()}, {n: b.cpu() for n, b in part.items()}) == []


@backends
def test_another_key_or_position_gives_other_bits(backend, device):
    x = matrix(device)
    x[16:32] = x[32:] = x[:16]
    q = quantize(x, SR, None, rowwise_key=key(0), backend=backend).rowwise["q"]
    assert not torch.equal(q, quantize(x, SR, None, rowwise_key=key(1), backend=backend).rowwise["q"])
    assert not torch.equal(q[:16], q[16:32]) and not torch.equal(q[16:32], q[32:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("text", "shape"),
    crossed(STOCHASTIC, [(16, 16), (48, 112), (144, 272), (16, 4096)], whole=FEW_STOCHASTIC)
    + [(text, (128, 256)) for text in WIDE if parse(text).stochastic],
)
def test_kernels_draw_the_bits_of_the_reference(shape, text, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))
    key = RngKey(seed=2**31 + 5, slot="x", step=2**33 + 7)
    call = {"rowwise_key": key, "columnwise_key": key}
    got = quantize(x.to(device), parse(text), parse(text), **call, backend="kernel")
    expected = quantize(x, parse(text), parse(text), **call, backend="reference")
    assert differences(got.rowwise, expected.rowwise) == [] == differences(got.columnwise, expected.columnwise)
