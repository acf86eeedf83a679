"""A fixed computation through every format, as one hash: two builds with the same hash round alike.

Compiler, flags, instruction set and device may all change numbers without a word (contraction, fast-math, a flushed
subnormal, another order of a sum). The manifest of a run holds this hash beside the flags of its build.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand, RngKey, parse
from hqsweep.memo import memo
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Backend, Target

EXPECTED = "efe9481fa9da443f263ba55e89ae7d3fb70d8af9334c5095af96a6e9980a1110"
"""The hash of the reference, and of every kernel that keeps its promise."""

FORMATS = (
    "fp8_current",
    "fp8_current+e5m2+pow2",
    "fp8_block",
    "fp8_block+2d+fp32_scale",
    "mxfp8",
    "mxfp8+e5m2+2d",
    "mxfp8+floor",
    "mxfp6_e2m3",
    "mxfp6_e3m2+even",
    "mxfp4",
    "nvfp4",
    "nvfp4+2d+sr",
    "nvfp4+rht+sr",
    "nvfp4+row_scaled",
    "nvfp4+4over6+fast_error",
    "nvfp4+2d+4over6+mse",
    "nvfp4+tensor",
    "nvfp4+tensor+rht+sr",
)
ROWS, COLS = 80, 176
"""Multiples of 16, and partial blocks of 32 and 128 both ways."""


def fingerprint(device: torch.device | str = "cpu", backend: Backend = "auto") -> str:
    """SHA-256 over codes, scales, amaxes and exact operands of both directions of a fixed matrix, in hex."""
    digest = hashlib.sha256()
    key = RngKey(seed=1, slot="fingerprint", step=2**33 + 1)
    for number, text in enumerate(FORMATS):
        x = multiples() if "4over6" in text else wide_range(3 if number % 2 else 23)
        x = x.to(torch.bfloat16 if number % 2 else torch.float32).to(device)
        source = "rowwise_dequantized" if number % 4 == 0 else "original"
        for output in ("codes", "exact"):
            targets = (Target(format, output, key) for format in (parse(text), parse(FORMATS[number - 1])))
            quantized = quantize(x, *targets, columnwise_source=source, backend=backend)
            for tensor in _tensors(quantized.rowwise, quantized.columnwise):
                digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@memo
def kernel_digest(device: torch.device) -> str:
    """fingerprint() of the kernels that runs on this device take, computed once in a process."""
    return fingerprint(device)


def wide_range(mantissa_bits: int) -> Tensor:
    """float32 [ROWS, COLS] by integer arithmetic: both signs, zeros, and neighbouring blocks of 16 far apart, from
    subnormals up to 2^64. Few mantissa bits bring many ties."""
    row, column, mixed = _mixed()
    block = (row // 4 * 7 + column // 16 * 13) % 48 * 4
    biased = (block - 4 + (mixed >> 9) % 5).clamp(min=0)
    mantissa = mixed * 97 & 0x7FFFFF & -1 << 23 - mantissa_bits
    bits = torch.where(mixed % 61 == 0, 0, biased << 23 | mantissa) | mixed >> 31 << 31
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def multiples() -> Tensor:
    """float32 [ROWS, COLS] of -24 to 24 times 0.3: the two candidates of 4over6 then often have the same error but for
    its roundings, and a contracted multiplication and addition takes the other one."""
    return ((_mixed()[2] >> 9) % 49 - 24).float() * torch.tensor(0.3)


def _mixed() -> tuple[Tensor, Tensor, Tensor]:
    """Indices of rows and columns, and 32 well mixed bits of both."""
    row, column = torch.arange(ROWS)[:, None], torch.arange(COLS)[None]
    return row, column, (row * 2654435761 ^ column * 2246822519 ^ row * column * 40503) & 0xFFFFFFFF


def _tensors(*directions: dict[str, Tensor] | ExactOperand) -> Iterator[Tensor]:
    for result in directions:
        if isinstance(result, ExactOperand):
            yield result.matrix.bfloat16()
            if result.factor is not None:
                yield result.factor
        else:
            yield from result.values()
