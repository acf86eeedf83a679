"""csrc/{cpu/dequantize.cpp,cuda/dequantize.cu}: all codes under all kinds of scale, tails and dtypes, NaN bits too."""

import pytest
import torch
from cases import KERNELS, LOW_BASES, crossed

from hqsweep.formats import parse
from hqsweep.ops.quantize.quantize import dequantize, exact_operand_of

SHAPES = ((1, 16), (3, 48), (17, 272), (130, 2064))
ODD_SHAPES = ((1, 1), (5, 7), (129, 131))
"""For formats whose last axis may be cut anywhere."""
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


CUT_ANYWHERE = [text for text in KERNELS if parse(text).column_multiple == 1]
CASES = crossed(KERNELS, SHAPES, whole=LOW_BASES) + crossed(CUT_ANYWHERE, ODD_SHAPES, whole=LOW_BASES)


def any_buffers(format, shape):
    """Every code and every scale byte, special ones included; float scales over many binades."""
    generator = torch.Generator().manual_seed(0)
    buffers = format.empty(*shape, "cpu")
    for name, buffer in buffers.items():
        if buffer.dtype == torch.uint8:
            top = 256 if name == "s" or format.element_bits != 6 else 64
            buffer.copy_(torch.randint(0, top, buffer.shape, generator=generator))
        else:
            power = torch.randint(-149, 128, buffer.shape, generator=generator)
            mantissa = 1 + torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
            buffer.copy_(mantissa * torch.exp2(power.double()))
    return buffers


def bits(x):
    """Bit patterns with every NaN as the positive quiet one: NumPy, torch and the kernels differ in its sign only."""
    quiet = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[x.dtype]
    integers = x.view({4: torch.int32, 2: torch.int16}[x.dtype.itemsize])
    return torch.where(x.isnan(), quiet, integers).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("text", "shape"), CASES, ids=lambda v: str(v))
def test_values_are_those_of_the_reference(text, shape, device):
    format = parse(text)
    buffers = any_buffers(format, shape)
    placed = {name: t.to(device) for name, t in buffers.items()}
    expected = format.decode(buffers, shape)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        actual = dequantize(placed, format, shape, dtype, backend="kernel")
        assert torch.equal(bits(actual), bits(expected.to(dtype))), dtype
        if actual.isnan().any():  # one NaN on every device
            raw = actual.view({4: torch.int32, 2: torch.int16}[dtype.itemsize])[actual.isnan()].cpu()
            assert torch.equal(raw, bits(actual)[actual.isnan().cpu()]), dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("text", "shape"), CASES, ids=lambda v: str(v))
def test_exact_operands_are_those_of_the_reference(text, shape, device):
    format = parse(text)
    buffers = any_buffers(format, shape)
    actual = exact_operand_of({n: t.to(device) for n, t in buffers.items()}, format, shape, backend="kernel")
    expected = format.operand(buffers, shape)
    assert torch.equal(bits(actual.matrix.to(expected.matrix.dtype)), bits(expected.matrix))
    assert actual.divisor == expected.divisor


@pytest.mark.gpu
def test_unaligned_buffers_on_the_gpu():
    """Buffers that start anywhere: loads fall back to bytes."""
    format, shape = parse("mxfp8"), (64, 256)
    buffers = any_buffers(format, shape)
    memory = torch.zeros(1 + buffers["q"].numel(), dtype=torch.uint8, device="cuda")
    memory[1:] = buffers["q"].flatten().cuda()
    shifted = {"q": memory[1:].view(shape), "s": buffers["s"].cuda()}
    actual = dequantize(shifted, format, shape, torch.bfloat16, backend="kernel")
    assert torch.equal(bits(actual), bits(format.decode(buffers, shape).bfloat16()))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_decode(device):
    format = parse("mxfp8")
    assert dequantize(format.empty(0, 64, device), format, (0, 64), torch.bfloat16).shape == (0, 64)
