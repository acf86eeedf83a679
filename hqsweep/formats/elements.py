"""Element types: the 4, 6 and 8 bit codes, and the scales E8M0 and UE5M3, in integer bit work on FP32.

One formula serves every element. Write |x| = k * 2^(e - m), where e is the exponent of x, at least the smallest
normal exponent, and m the element's mantissa bits. k is exact in FP32. Its round-half-even is an integer r, and the
code is ((e - e_min) << m) + r. Subnormals are the case e = e_min. A carry out of the mantissa increments the exponent
by itself. Rounding is RNE, overflow saturates, and the sign of zero is kept, as in the hardware's cvt.rn.satfinite.
INT8 and E1M2 have two binades of equal steps, which are a uniform grid. E1M2 is INT4 from -7 to 7, halved. Their
codes are sign and magnitude, too.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Element:
    """A sign-magnitude code of 1 + exponent_bits + mantissa_bits bits. encode never produces an infinity."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite magnitude that encode produces (E4M3 448, E5M2 57344, E2M1 6, E2M3 7.5, E3M2 28, E1M2 3.5)."""
    nan_code: int
    """The code of NaN with either sign. Elements without a NaN use their largest positive code."""
    first_normal: int | None = None
    """Exponent of the smallest normal number; None: that of IEEE 754 for these exponent bits."""

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number; subnormals have steps of 2^(min_exponent - mantissa_bits)."""
        return 2 - 2 ** (self.exponent_bits - 1) if self.first_normal is None else self.first_normal

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: emax of the OCP MX specification."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def exact_scale_range(self) -> tuple[float, float]:
        """Powers of two [low, high] for which scale * value(code) fits in bfloat16 for every finite code.

        low = 2^-133 / min_subnormal keeps the smallest step at bfloat16's smallest subnormal; high keeps max below
        2^128.
        """
        return 2.0**-133 / self.min_subnormal, 2.0 ** (127 - self.max_exponent)

    def encode(self, x: Tensor) -> Tensor:
        """Return uint8 codes, one per byte, of a float32 tensor of any shape. RNE, saturating."""
        bits = x.contiguous().view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        a = magnitude.view(torch.float32).clamp(max=self.max)
        exponent = ((a.view(torch.int32) >> 23) - 127).clamp(min=self.min_exponent)
        scale = ((self.mantissa_bits - exponent + 127) << 23).view(torch.float32)
        rounded = torch.round(a * scale).to(torch.int32)
        code = ((exponent - self.min_exponent) << self.mantissa_bits) + rounded
        code |= (bits >> 31 & 1) << (self.bits - 1)
        return torch.where(magnitude > 0x7F800000, self.nan_code, code).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the exact float32 values of uint8 codes. Codes above 2^bits - 1 are invalid."""
        return _decode_table(self, codes.device)[codes.to(torch.int32)]

    def values(self) -> Tensor:
        """Return float32 [2^bits]: the value of every code."""
        code = torch.arange(2**self.bits, dtype=torch.int32)
        magnitude = code & (2 ** (self.bits - 1) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & (2**self.mantissa_bits - 1)
        hidden = (exponent > 0).to(torch.int32) << self.mantissa_bits
        power = exponent.clamp(min=1) - 1 + self.min_exponent - self.mantissa_bits
        value = (mantissa + hidden).double() * torch.exp2(power.double())
        value = self._mark_specials(value, magnitude)
        return torch.where(code >> (self.bits - 1) > 0, -value, value).float()

    def _mark_specials(self, value: Tensor, magnitude: Tensor) -> Tensor:
        """Set OCP's 8-bit specials: E4M3 has NaN at 0x7F; E5M2 has inf at 0x7C and NaN above. 4 and 6 bits have
        none."""
        if self.name == "e4m3":
            value = torch.where(magnitude == 0x7F, torch.nan, value)
        if self.name == "e5m3":
            value = torch.where(magnitude == 0xFF, torch.nan, value)
        if self.name == "e5m2":
            value = torch.where(magnitude == 0x7C, torch.inf, value)
            value = torch.where(magnitude > 0x7C, torch.nan, value)
        return value


@cache
def _decode_table(element: Element, device: torch.device) -> Tensor:
    return element.values().to(device)


E4M3 = Element(name="e4m3", exponent_bits=4, mantissa_bits=3, max=448.0, nan_code=0x7F)
E5M2 = Element(name="e5m2", exponent_bits=5, mantissa_bits=2, max=57344.0, nan_code=0x7F)
E2M1 = Element(name="e2m1", exponent_bits=2, mantissa_bits=1, max=6.0, nan_code=0x07)
E2M3 = Element(name="e2m3", exponent_bits=2, mantissa_bits=3, max=7.5, nan_code=0x1F)
E3M2 = Element(name="e3m2", exponent_bits=3, mantissa_bits=2, max=28.0, nan_code=0x1F)
E1M2 = Element(name="e1m2", exponent_bits=1, mantissa_bits=2, max=3.5, nan_code=0x07)
INT8 = Element(name="int8", exponent_bits=1, mantissa_bits=6, max=127.0, nan_code=0x7F, first_normal=6)
ELEMENTS = {e.name: e for e in (E4M3, E5M2, E2M1, E2M3, E3M2, E1M2, INT8)}
UE5M3 = Element(name="e5m3", exponent_bits=5, mantissa_bits=3, max=114688.0, nan_code=0xFF)
"""A scale of 8 bits without sign; its codes of numbers >= 0 fit a byte."""


def e8m0_up(x: Tensor) -> Tensor:
    """Return uint8 E8M0 of non-negative float32, exponent rounded up; up to 2^-127 -> 0x00, inf -> 0xFE, NaN ->
    0xFF."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = exponent + up.to(torch.int32)
    code = torch.where(bits == 0x7F800000, 0xFE, code)
    return torch.where(bits > 0x7F800000, 0xFF, code).to(torch.uint8)


def e8m0_floor(amax: Tensor, element: Element, rounding: str = "floor") -> Tensor:
    """Return uint8 E8M0 of 2^(floor(log2(amax)) - emax), at least 2^-127, for float32 block amaxes; NaN -> 0xFF.

    rounding "even": first round amax to the element's mantissa bits, ties up (a carry raises the exponent); "ceil":
    first round it up to a power of two. An infinite amax counts as 2^128.
    """
    bits = amax.contiguous().view(torch.int32)
    added = {"floor": 0, "even": 1 << (22 - element.mantissa_bits), "ceil": (1 << 23) - 1}[rounding]
    code = ((bits + added >> 23) - element.max_exponent).clamp(min=0)
    return torch.where(bits > 0x7F800000, 0xFF, code).to(torch.uint8)


def e8m0_decode(codes: Tensor) -> Tensor:
    """Return the exact float32 2^(code - 127) of uint8 E8M0 (code 0 is the subnormal 2^-127); 255 -> NaN."""
    code = codes.to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, code << 23)
    return torch.where(code == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_reciprocal(codes: Tensor) -> Tensor:
    """Return the exact float32 2^(127 - code) of uint8 E8M0 (code 254 gives the subnormal 2^-127); 255 -> NaN."""
    return e8m0_decode(torch.where(codes == 255, codes, 254 - codes))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return uint8 [..., n/2] of 4-bit codes [..., n], n even. The even index is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the inverse of pack_nibbles: uint8 4-bit codes [..., n] of uint8 [..., n/2]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
