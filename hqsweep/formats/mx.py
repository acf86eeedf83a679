"""OCP Microscaling formats: 32 elements share an E8M0 scale, a power of two made from their largest magnitude.

code = RNE(fl(x * 2^(127 - e))), saturating; value = code * 2^(e - 127). NaN does not count in amax. The byte e, for an
element with largest value max = 1.f * 2^emax and m mantissa bits:
  (default)  E8M0_up(fl(amax * fl(1 / max))), the smallest power that saturates nothing: TransformerEngine's MXFP8
             (cast/mxfp8/quantize_mxfp8.cuh at d0067d0da6cb), and torchao's RCEIL but for its inexact log2.
  +floor     2^(floor(log2(amax)) - emax): OCP MX v1.0 section 6.3, torchao's FLOOR. Values above max saturate.
  +even      the same with amax first rounded to m bits, ties up: torchao 0.18 ScaleCalculationMode.EVEN.
  +ceil      2^(ceil(log2(amax)) - emax): torchao 0.18 ScaleCalculationMode.CEIL. Saturates less than +floor.
Exponents below the range become 0. An infinite amax gives 0xFE by default, and counts as 2^128 otherwise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats.base import Buffer, Buffers, ExactOperand, Format, expand_tiles, tile_amax
from hqsweep.formats.elements import (
    ELEMENTS,
    Element,
    e8m0_decode,
    e8m0_floor,
    e8m0_reciprocal,
    e8m0_up,
    pack_nibbles,
    unpack_nibbles,
)
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import MX as SPEC
from hqsweep.memo import cached_property


@dataclass(frozen=True, kw_only=True)
class MX(Format):
    """mxfp8 (E4M3 or E5M2), mxfp6_e2m3 and mxfp6_e3m2, in blocks of 1x32, or in 32x32 tiles with two_d.

    Partial blocks at the edges use the existing elements. MXFP6 stores one code per byte. operand():
    code * 2^(e - 127) in bfloat16. It is exact if the scale lies in the element's exact_scale_range (for E4M3: block
    amax from about 2^-116 to 2^127); outside it is rounded to bfloat16.
    """

    family, scaling = SPEC, SPEC.scaling

    name: str = "mxfp8"
    element_name: str = "e4m3"
    """The element of the codes."""
    two_d: bool = False
    """Whether scales cover 32x32 tiles."""
    scale_rounding: str = "up"
    """How amax / max becomes a power of two: up, floor, even or ceil."""

    @property
    def element(self) -> Element:
        return ELEMENTS[self.element_name]

    @property
    def element_bits(self) -> int:
        return self.element.bits

    @property
    def tile(self) -> tuple[int, int]:
        return (32, 32) if self.two_d else (1, 32)

    @property
    def kernel_fields(self) -> dict[str, object]:
        return {
            "family": "mx",
            "element": self.element_name,
            "scale_rounding": self.scale_rounding,
        }

    @property
    def packed(self) -> bool:
        return self.element.bits == 4

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        return {"q": Buffer(1, 2 if self.packed else 1, torch.uint8), "s": Buffer(*self.tile, torch.uint8)}

    def grid(self, x: Tensor, key: RngKey | None = None) -> dict[str, Tensor]:
        return {"s": tile_amax(self.basis(x), *self.tile)}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        self.check_shape(*x.shape)
        amax = (self.grid(x) if grid is None else grid)["s"]
        exponents = self._exponents(amax)
        scale = expand_tiles(e8m0_reciprocal(exponents), x.shape, *self.tile)
        codes = self._codes(self.basis(x) * scale, key)
        return {"q": pack_nibbles(codes) if self.packed else codes, "s": exponents}

    def _codes(self, scaled: Tensor, key: RngKey | None) -> Tensor:
        """Return the code of every scaled element, one per byte."""
        return self.element.encode(scaled)

    def _exponents(self, amax: Tensor) -> Tensor:
        if self.scale_rounding == "up":
            return e8m0_up(amax * torch.full_like(amax, 1.0 / self.element.max))
        return e8m0_floor(amax, self.element, self.scale_rounding)

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        return self.element.decode(self.codes(buffers)) * expand_tiles(self.scales(buffers), shape, *self.tile)

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        return ExactOperand(self.decode(buffers, shape).bfloat16())

    def scales(self, buffers: Buffers) -> Tensor:
        return e8m0_decode(buffers["s"])

    def codes(self, buffers: Buffers) -> Tensor:
        return unpack_nibbles(buffers["q"]) if self.packed else buffers["q"]
