"""NVFP4 with UE5M3 block scales, which need no amax of the tensor: 5 exponent bits reach from 2^-17 to 114688.

sf = UE5M3(fl(b * fl(1/6))) for block amax b;   s = min(fl(1 / f32(sf)), FLT_MAX)
code = E2M1(fl(x * s));   value = code * sf
This is nvfp4's arithmetic with a global scale of 1. UE5M3 has no sign, a bias of 15 and a NaN at 0xFF.
TransformerEngine prototypes it as NVFP4 with UE5M3 scales. Blocks with an amax of 6 * 2^-18 or less get the scale 0,
and their values are lost.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hqsweep.formats.base import FLT_MAX, Buffer, Buffers, ExactOperand, Format, divide, expand_tiles, tile_amax
from hqsweep.formats.elements import ELEMENTS, UE5M3, Element, pack_nibbles, unpack_nibbles
from hqsweep.formats.hadamard import check_signs, transformed
from hqsweep.formats.nvfp4 import BLOCK, round_four
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import NVFP4_UE5M3
from hqsweep.memo import cached_property


@dataclass(frozen=True, kw_only=True)
class NVFP4UE5M3(Format):
    """nvfp4+ue5m3 with its options; columns must be a multiple of 16, or of the transform's size.

    operand(): code * sf in bfloat16, exact for every code and scale (at most 6 significant bits).
    """

    name = "nvfp4+ue5m3"
    family, scaling = NVFP4_UE5M3, NVFP4_UE5M3.scaling

    element_name: str = "e2m1"
    """The element of the codes: e2m1, or the uniform grid e1m2."""
    two_d: bool = False
    """Whether scales cover 16x16 tiles: the transposed codes are then the codes of the transpose."""
    rht: int = 0
    """The size of the random Hadamard transform along the contracted axis that comes first; 0: none. Both operands of a
    product take the same."""
    rht_signed: bool = True
    """Whether the transform has signs, or none."""
    sr: bool = False
    """Whether elements are rounded stochastically, by a key; scales stay RNE."""

    def __post_init__(self) -> None:
        check_signs(self)

    @property
    def element(self) -> Element:
        return ELEMENTS[self.element_name]

    @property
    def element_bits(self) -> int:
        return 4

    @property
    def tile(self) -> tuple[int, int]:
        return (BLOCK, BLOCK) if self.two_d else (1, BLOCK)

    @property
    def stochastic(self) -> bool:
        return self.sr

    @property
    def rowwise_form(self) -> "NVFP4UE5M3":
        return replace(self, rht=0, rht_signed=True)

    @property
    def column_multiple(self) -> int:
        return max(BLOCK, self.rht)

    @property
    def kernel_fields(self) -> dict[str, object]:
        transform = {"rht": self.rht, "rht_sign": self.rht_signed}
        return {"family": "ue5m3", "element": self.element_name, "sr": self.sr} | transform

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        return {"q": Buffer(1, 2, torch.uint8), "s": Buffer(*self.tile, torch.uint8)}

    def grid(self, x: Tensor, key: RngKey | None = None) -> dict[str, Tensor]:
        return {"s": tile_amax(transformed(self, x), *self.tile)}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        self.check_shape(*x.shape)
        amax = (self.grid(x) if grid is None else grid)["s"]
        scales = UE5M3.encode(amax * torch.full_like(amax, 1.0 / self.element.max))
        inverse = divide(1.0, UE5M3.decode(scales)).clamp(max=FLT_MAX)
        scaled = self.basis(x) * expand_tiles(inverse, x.shape, *self.tile)
        codes = round_four(scaled, self.element, sr=self.sr, key=key, name=self.text)
        return {"q": pack_nibbles(codes), "s": scales}

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        """Return values in the basis of the codes: with +rht they stay transformed, as the GEMM takes them."""
        return self.element.decode(self.codes(buffers)) * expand_tiles(self.scales(buffers), shape, *self.tile)

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        return ExactOperand(self.decode(buffers, shape).bfloat16())

    def basis(self, x: Tensor, key: RngKey | None = None) -> Tensor:
        return transformed(self, x).float()

    def scales(self, buffers: Buffers) -> Tensor:
        return UE5M3.decode(buffers["s"])

    def codes(self, buffers: Buffers) -> Tensor:
        return unpack_nibbles(buffers["q"])
