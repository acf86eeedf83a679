"""One hash over a fixed computation in every format: builds with equal hashes round alike.

Compiler, flags, instruction set and device can all change numbers silently: by contraction, fast-math, flushed
subnormals, or another order of a sum. A run's manifest stores this hash beside the build flags.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hqsweep.formats import ExactOperand, RngKey, parse
from hqsweep.formats.spec import FAMILIES
from hqsweep.memo import memo
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Backend, Target

FORMATS = tuple(text for family in FAMILIES for text in family.fingerprint)
ROWS, COLS = 80, 176
"""Multiples of 16 that leave partial blocks of 32 and 128 along both axes."""


def fingerprint(device: torch.device | str = "cpu", backend: Backend = "auto") -> str:
    """Return the SHA-256 hex digest over codes, scales, amaxes and exact operands of a fixed matrix, in both
    directions."""
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
    """Return fingerprint() of the kernels used on this device, computed once per process."""
    return fingerprint(device)


def wide_range(mantissa_bits: int) -> Tensor:
    """Return float32 [ROWS, COLS] made by integer arithmetic, with few mantissa bits where ties shall be frequent.

    It has both signs and zeros. Neighbouring blocks of 16 differ widely, from subnormals to 2^64.
    """
    row, column, mixed = _mixed()
    block = (row // 4 * 7 + column // 16 * 13) % 48 * 4
    biased = (block - 4 + (mixed >> 9) % 5).clamp(min=0)
    mantissa = mixed * 97 & 0x7FFFFF & -1 << 23 - mantissa_bits
    bits = torch.where(mixed % 61 == 0, 0, biased << 23 | mantissa) | mixed >> 31 << 31
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def multiples() -> Tensor:
    """Return float32 [ROWS, COLS] with values k * 0.3, k from -24 to 24.

    The two candidate scales of 4over6 then often have equal errors up to rounding. A fused multiply-add picks the
    other.
    """
    return ((_mixed()[2] >> 9) % 49 - 24).float() * torch.tensor(0.3)


def _mixed() -> tuple[Tensor, Tensor, Tensor]:
    """Return row indices, column indices, and a 32-bit hash of both."""
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
