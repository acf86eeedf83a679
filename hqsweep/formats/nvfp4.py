"""NVFP4: E2M1 codes, an E4M3 scale for 16 elements, and one float32 amax for the tensor (or for each row).

Arithmetic and its order are TransformerEngine's (common/cast/nvfp4/* at d0067d0da6cb):
  S_enc = min(fl(m / A), FLT_MAX), m = 6 * 448 (6 * 256 with 4over6), 1 when A is 0 or inf;   S_dec = fl(1 / S_enc)
  sf = E4M3(min(fl(b * fl(S_enc * fl(1/6))), FLT_MAX)) for block amax b;   s = min(fl(1 / fl(sf * S_dec)), FLT_MAX)
  code = E2M1(fl(x * s));   value = code * sf * A / m
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hqsweep.config.format_text import OPTIONS, SCALINGS
from hqsweep.errors import UserError
from hqsweep.formats.base import (
    WHOLE,
    Buffer,
    Buffers,
    ExactOperand,
    Format,
    divide,
    expand_tiles,
    tile_amax,
)
from hqsweep.formats.elements import E2M1, E4M3, Element, pack_nibbles, unpack_nibbles
from hqsweep.formats.hadamard import hadamard
from hqsweep.formats.nvfp4_scales import BLOCK, FourOverSix, block_encode_scale
from hqsweep.formats.random import RngKey
from hqsweep.formats.stochastic import round_e2m1
from hqsweep.formats.tiles import FLT_MAX
from hqsweep.memo import cached_property


@dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
    """NVFP4 with its options; columns must be a multiple of 16.

    operand(): code * sf in bfloat16, exact for every code and scale (at most 6 significant bits between 2^-10 and
    2688); factor = A and divisor = 6 * scale_max are applied to the float32 accumulator.
    """

    name = "nvfp4"
    scaling = SCALINGS["nvfp4"]
    amax_name = "g"
    element_name = "e2m1"
    OPTIONS = OPTIONS["nvfp4"]

    two_d: bool = False
    """Whether scales cover 16x16 tiles: the transpose of the codes is the code of the transpose."""
    rht: bool = False
    """Whether a random Hadamard transform along the contracted axis comes first; only meaningful columnwise, on both
    wgrad operands."""
    rht_signed: bool = True
    """Whether the transform has the signs of TransformerEngine's, or none."""
    sr: bool = False
    """Whether elements are rounded stochastically, by a key (scales stay RNE)."""
    row_scaled: bool = False
    """Whether there is one amax a row instead of one for the tensor; only meaningful rowwise."""
    four_over_six: bool = False
    """Whether the amax of each block is mapped to 6 or to 4, whichever gives the smaller error."""
    error_mode: str = "mae"
    """The error that 4over6 compares: mean absolute (mae) or squared (mse)."""
    fast_error: bool = False
    """Whether 4over6 compares float16 products of code and scale with x * S_enc, without the division."""
    e4m3_max: int = 0
    """The largest block scale used with 4over6, 448 or 256; 0 stands for the default: 256 with 4over6, 448 without."""

    def __post_init__(self) -> None:
        random = [o for o in ("rht", "sr") if getattr(self, o)]
        if self.row_scaled and (random or self.two_d):
            raise UserError(f"nvfp4: row_scaled cannot be combined with {', '.join(random) or '2d'}")
        if self.four_over_six and random:
            raise UserError(f"nvfp4: 4over6 cannot be combined with {', '.join(random)}")
        if not self.four_over_six and (self.error_mode != "mae" or self.fast_error or self.e4m3_max):
            raise UserError("nvfp4: mse, fast_error and max448 choose how 4over6 decides; add +4over6 or drop them")
        if not self.rht and not self.rht_signed:
            raise UserError("nvfp4: nosign describes the transform of +rht; add +rht or drop it")

    @property
    def element_bits(self) -> int:
        return 4

    @property
    def element(self) -> Element:
        return E2M1

    @property
    def scale_max(self) -> int:
        return self.e4m3_max or (256 if self.four_over_six else 448)

    @property
    def tile(self) -> tuple[int, int]:
        return (BLOCK, BLOCK) if self.two_d else (1, BLOCK)

    @property
    def stochastic(self) -> bool:
        return self.sr

    @property
    def divisor(self) -> float:
        return 6.0 * self.scale_max

    @property
    def rowwise_form(self) -> "NVFP4":
        return replace(self, rht=False, rht_signed=True)

    @property
    def columnwise_form(self) -> "NVFP4":
        return replace(self, row_scaled=False)

    @property
    def kernel_fields(self) -> dict[str, object]:
        return {
            "family": "nvfp4",
            "element": self.element_name,
            "four_over_six": self.error_mode if self.four_over_six else "none",
            "fast_error": self.fast_error,
            "row_scaled": self.row_scaled,
            "rht": self.rht,
            "rht_sign": self.rht_signed,
            "sr": self.sr,
            "e4m3_max": self.scale_max,
        }

    @cached_property
    def scale_choice(self) -> FourOverSix:
        """The rule by which +4over6 decides."""
        return FourOverSix(tile=self.tile, error_mode=self.error_mode, fast_error=self.fast_error, divisor=self.divisor)

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        return {
            "q": Buffer(1, 2, torch.uint8),
            "s": Buffer(*self.tile, torch.uint8),
            "g": Buffer(1 if self.row_scaled else WHOLE, WHOLE, torch.float32),
        }

    @property
    def column_multiple(self) -> int:
        return BLOCK

    def grid(self, x: Tensor) -> dict[str, Tensor]:
        x = self._transform(x)
        return {"s": tile_amax(x, *self.tile), "g": tile_amax(x, 1 if self.row_scaled else WHOLE, WHOLE)}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        self.check_shape(*x.shape)
        grid = self.grid(x) if grid is None else grid
        x = self._transform(x).float()
        encode_scale = self.global_scale(grid["g"])
        if self.four_over_six:
            codes, scales = self.scale_choice.choose(x, grid["s"], grid["g"], encode_scale)
            return {"q": pack_nibbles(codes), "s": scales, "g": grid["g"]}
        sixth = encode_scale * torch.full_like(encode_scale, 1.0 / 6.0)
        scales = E4M3.encode((grid["s"] * sixth).clamp(max=FLT_MAX))
        scaled = x * expand_tiles(block_encode_scale(scales, encode_scale), x.shape, *self.tile)
        codes = round_e2m1(scaled, sr=self.sr, key=key, name=self.text)
        return {"q": pack_nibbles(codes), "s": scales, "g": grid["g"]}

    def global_scale(self, amax: Tensor) -> Tensor:
        """S_enc of each global amax, float32, same shape."""
        scale = divide(self.divisor, amax).clamp(max=FLT_MAX)
        return torch.where((amax == 0) | (scale == 0), 1.0, scale)

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        """Values in the basis of the codes: with +rht they stay transformed, as the GEMM consumes them."""
        return E2M1.decode(self.codes(buffers)) * expand_tiles(self.value_scales(buffers), shape, *self.tile)

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        matrix = E2M1.decode(self.codes(buffers)) * expand_tiles(self.scales(buffers), shape, *self.tile)
        return ExactOperand(matrix.bfloat16(), buffers["g"], self.divisor)

    def scales(self, buffers: Buffers) -> Tensor:
        return E4M3.decode(buffers["s"])

    def value_scales(self, buffers: Buffers) -> Tensor:
        """fl(fl(sf * A) * fl(1 / m)) of every block."""
        amax = buffers["g"]
        return self.scales(buffers) * amax * torch.full_like(amax, 1.0 / self.divisor)

    def basis(self, x: Tensor) -> Tensor:
        return self._transform(x).float()

    def codes(self, buffers: Buffers) -> Tensor:
        return unpack_nibbles(buffers["q"])

    def _transform(self, x: Tensor) -> Tensor:
        if not self.rht:
            return x
        self.check_shape(*x.shape)
        return hadamard(x, signed=self.rht_signed).bfloat16()
