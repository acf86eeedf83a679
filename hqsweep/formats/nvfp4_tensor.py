"""E2M1 codes under one float32 scale for the tensor: NVFP4 without block scales.

scale = S(A), computed by fp8_scale() with max 6: fl(6 / A) for the tensor's amax A, 1 if A is 0 or inf, at most
FLT_MAX, truncated to a power of two with +pow2. code = E2M1(fl(x * scale)), saturating; scale_inv = fl(1 / scale);
value = fl(code * scale_inv). scale_inv is stored. The arithmetic is fp8_current's; rounding (RNE or +sr) and transform
(+rht) are nvfp4's. No library has the format: it shows what block scales are worth.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hqsweep.formats.base import FLT_MAX, WHOLE, Buffer, Buffers, ExactOperand, Format, divide, fp8_scale, tile_amax
from hqsweep.formats.elements import E2M1, Element, pack_nibbles, unpack_nibbles
from hqsweep.formats.hadamard import check_signs, transformed
from hqsweep.formats.nvfp4 import round_four
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import NVFP4_TENSOR
from hqsweep.memo import cached_property


@dataclass(frozen=True, kw_only=True)
class NVFP4Tensor(Format):
    """nvfp4+tensor with its options; columns must be a multiple of 16.

    operand(): matrix = codes in bfloat16 (always exact), factor = scale_inv.
    """

    name = "nvfp4+tensor"
    family, scaling = NVFP4_TENSOR, NVFP4_TENSOR.scaling
    amax_name = "s"
    element_name = "e2m1"
    tile = (WHOLE, WHOLE)

    rht: int = 0
    """The size of the random Hadamard transform along the contracted axis that comes first; 0: none. Both operands of a
    product take the same."""
    rht_signed: bool = True
    """Whether the transform has signs, or none."""
    sr: bool = False
    """Whether elements are rounded stochastically, by a key."""
    pow2: bool = False
    """Whether the scale is truncated to a power of two."""

    def __post_init__(self) -> None:
        check_signs(self)

    @property
    def column_multiple(self) -> int:
        return max(16, self.rht)

    @property
    def element_bits(self) -> int:
        return 4

    @property
    def element(self) -> Element:
        return E2M1

    @property
    def stochastic(self) -> bool:
        return self.sr

    @property
    def rowwise_form(self) -> "NVFP4Tensor":
        return replace(self, rht=0, rht_signed=True)

    @property
    def kernel_fields(self) -> dict[str, object]:
        return {
            "family": "current",
            "element": self.element_name,
            "pow2": self.pow2,
            "rht": self.rht,
            "rht_sign": self.rht_signed,
            "sr": self.sr,
        }

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        return {"q": Buffer(1, 2, torch.uint8), "s": Buffer(*self.tile, torch.float32)}

    def grid(self, x: Tensor, key: RngKey | None = None) -> dict[str, Tensor]:
        return {"s": tile_amax(transformed(self, x), *self.tile)}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        self.check_shape(*x.shape)
        amax = (self.grid(x) if grid is None else grid)["s"]
        scale = fp8_scale(amax, fp8_max=E2M1.max, epsilon=0.0, pow2=self.pow2, inf_value=FLT_MAX)
        codes = round_four(self.basis(x) * scale, E2M1, sr=self.sr, key=key, name=self.text)
        return {"q": pack_nibbles(codes), "s": divide(1.0, scale)}

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        """Return values in the basis of the codes: with +rht they stay transformed, as the GEMM takes them."""
        return E2M1.decode(self.codes(buffers)) * buffers["s"]

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        return ExactOperand(E2M1.decode(self.codes(buffers)).bfloat16(), buffers["s"])

    def basis(self, x: Tensor, key: RngKey | None = None) -> Tensor:
        return transformed(self, x).float()

    def scales(self, buffers: Buffers) -> Tensor:
        return buffers["s"]

    def codes(self, buffers: Buffers) -> Tensor:
        return unpack_nibbles(buffers["q"])
