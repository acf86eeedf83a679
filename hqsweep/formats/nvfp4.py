"""NVFP4: E2M1 codes, an E4M3 scale for 16 elements, and one float32 amax for the tensor (or for each row).

Arithmetic and its order are TransformerEngine's (common/cast/nvfp4/* at d0067d0da6cb):
  S_enc = min(fl(m / A), FLT_MAX), m = 6 * 448 (6 * 256 with 4over6), 1 when A is 0 or inf;   S_dec = fl(1 / S_enc)
  sf = E4M3(min(fl(b * fl(S_enc * fl(1/6))), FLT_MAX)) for block amax b;   s = min(fl(1 / fl(sf * S_dec)), FLT_MAX)
  code = E2M1(fl(x * s));   value = code * sf * A / m

+4over6 maps the amax of a block to 6 or to 4 (Cook et al., Four Over Six, arXiv 2512.02010), as in
common/cast/nvfp4/quantize_4over6_nvfp4.cuh: both candidates are encoded, their errors are summed in float32 in index
order, and 4 wins only if it is strictly better. With 16x16 tiles the 16 row sums are added as a tree with offsets 8, 4,
2, 1. Rows and columns are those that encode sees, so a near tie can fall differently for the transpose.

+rht is the random Hadamard transform of groups of 16 elements along the contracted axis (formats/hadamard.py). +eden
is MS-EDEN: with it the transform draws its signs, and block scales are corrected and rounded (formats/eden.py).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import eden
from hqsweep.formats.base import (
    FLT_MAX,
    WHOLE,
    Buffer,
    Buffers,
    ExactOperand,
    Format,
    divide,
    expand_tiles,
    tile_amax,
)
from hqsweep.formats.elements import E1M2, E2M1, E4M3, ELEMENTS, Element, pack_nibbles, unpack_nibbles
from hqsweep.formats.hadamard import check_signs, transformed
from hqsweep.formats.random import RngKey, random_bytes, segment_words
from hqsweep.formats.spec import NVFP4 as SPEC
from hqsweep.memo import cached_property

BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class FourOverSix:
    """The rule of 4over6: tiles that share a scale, the compared error, and the divisor m of values."""

    tile: tuple[int, int]
    error_mode: str
    """The compared error: mae or mse."""
    fast_error: bool
    """Whether float16 products of code and scale are compared with x * S_enc, without the division."""
    divisor: float

    def choose(self, x: Tensor, blocks: Tensor, amax: Tensor, encode_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes [rows, cols], E4M3 scale bytes) for float32 x [rows, cols], block amaxes, global amax and
        S_enc."""
        base = blocks / torch.full_like(blocks, 6.0) * encode_scale
        six, four = (E4M3.encode(b.clamp(max=448.0)) for b in (base, base * torch.full_like(base, 1.5)))
        code6, error6 = self._candidate(x, six, amax, encode_scale)
        code4, error4 = self._candidate(x, four, amax, encode_scale)
        take_four = error4 < error6
        mask = expand_tiles(take_four, x.shape, *self.tile)
        return torch.where(mask, code4, code6), torch.where(take_four, four, six)

    def _candidate(self, x: Tensor, scales: Tensor, amax: Tensor, encode_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of x under these block scales, and each tile's error."""
        sf = E4M3.decode(scales)
        inverse = block_encode_scale(scales, encode_scale)
        codes = E2M1.encode(x * expand_tiles(inverse, x.shape, *self.tile))
        values, sf = E2M1.decode(codes), expand_tiles(sf, x.shape, *self.tile)
        if self.fast_error:
            difference = (values * sf).half().float() - x * encode_scale
        else:
            difference = values * sf * amax / torch.full_like(amax, self.divisor) - x
        error = difference.abs() if self.error_mode == "mae" else difference * difference
        return codes, _sum_tiles(error, two_d=self.tile[0] > 1)


@dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
    """NVFP4 with its options; columns must be a multiple of 16.

    operand(): code * sf in bfloat16, exact for every code and scale (at most 6 significant bits between 2^-10 and
    2688). factor = A and divisor = 6 * scale_max are applied to the float32 accumulator.
    """

    name = "nvfp4"
    family, scaling = SPEC, SPEC.scaling
    amax_name = "g"

    element_name: str = "e2m1"
    """The element of the codes: e2m1, or the uniform grid e1m2, whose largest number 3.5 takes the place of 6."""
    two_d: bool = False
    """Whether scales cover 16x16 tiles: the transposed codes are then the codes of the transpose."""
    rht: int = 0
    """The size of the random Hadamard transform along the contracted axis that comes first; 0: none. Both operands of a
    product take the same."""
    rht_signed: bool = True
    """Whether the transform has signs, or none."""
    sr: bool = False
    """Whether elements are rounded stochastically, by a key; scales stay RNE."""
    eden: bool = False
    """Whether elements are rounded to nearest, and block scales stochastically, by a key, so that the operand is
    unbiased (MS-EDEN). It takes a transform, whose signs it draws."""
    row_scaled: bool = False
    """Whether each row has its own amax instead of one for the tensor; only rowwise."""
    four_over_six: bool = False
    """Whether the amax of each block is mapped to 6 or to 4, by the smaller error."""
    error_mode: str = "mae"
    """The error that 4over6 compares: mean absolute (mae) or squared (mse)."""
    fast_error: bool = False
    """Whether 4over6 compares float16 products of code and scale with x * S_enc, without the division."""
    e4m3_max: int = 0
    """The largest block scale used with 4over6, 448 or 256. 0 is the default: 256 with 4over6, 448 without."""

    def __post_init__(self) -> None:
        random = [o for o in ("rht", "sr", "eden") if getattr(self, o)]
        if self.row_scaled and (random or self.two_d):
            raise UserError(f"nvfp4: row_scaled cannot be combined with {', '.join(random) or '2d'}")
        if self.four_over_six and random:
            raise UserError(f"nvfp4: 4over6 cannot be combined with {', '.join(random)}")
        if self.four_over_six and self.element_name != "e2m1":
            raise UserError("nvfp4: 4over6 chooses between two numbers of E2M1; drop it or e1m2")
        if not self.four_over_six and (self.error_mode != "mae" or self.fast_error or self.e4m3_max):
            raise UserError("nvfp4: mse, fast_error and max448 choose how 4over6 decides; add +4over6 or drop them")
        check_signs(self)
        if self.eden:
            self._check_eden()

    def _check_eden(self) -> None:
        """Raise UserError for options that +eden does not take."""
        if not self.rht:
            raise UserError("nvfp4: eden corrects what a transform spreads; add +rht128, or +rht64, +rht32, +rht")
        others = {"nosign": not self.rht_signed, "sr": self.sr, "2d": self.two_d, "e1m2": self.element_name != "e2m1"}
        refused = [option for option, given in others.items() if given]
        if refused:
            raise UserError(
                f"nvfp4: eden cannot be combined with {', '.join(refused)}; it draws the signs, rounds elements to"
                " nearest, and corrects the scales of 1x16 blocks of E2M1"
            )

    @property
    def element_bits(self) -> int:
        return 4

    @property
    def element(self) -> Element:
        return ELEMENTS[self.element_name]

    @property
    def scale_max(self) -> int:
        return self.e4m3_max or (eden.SCALE_MAX if self.eden else 256 if self.four_over_six else 448)

    @property
    def most(self) -> float:
        """The number that a block's amax maps to."""
        return eden.MAX if self.eden else self.element.max

    @property
    def tile(self) -> tuple[int, int]:
        return (BLOCK, BLOCK) if self.two_d else (1, BLOCK)

    @property
    def stochastic(self) -> bool:
        return self.sr or self.eden

    @property
    def rht_drawn(self) -> bool:
        return self.eden

    @property
    def rowwise_only(self) -> bool:
        return self.row_scaled

    @property
    def divisor(self) -> float:
        return self.most * self.scale_max

    @property
    def rowwise_form(self) -> "NVFP4":
        return replace(self, rht=0, rht_signed=True, eden=False)

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
        } | ({"eden": True} if self.eden else {})

    @cached_property
    def scale_choice(self) -> FourOverSix:
        """The rule of +4over6."""
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
        return max(BLOCK, self.rht)

    def grid(self, x: Tensor, key: RngKey | None = None) -> dict[str, Tensor]:
        x = transformed(self, x, key)
        return {"s": tile_amax(x, *self.tile), "g": tile_amax(x, 1 if self.row_scaled else WHOLE, WHOLE)}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        self.check_shape(*x.shape)
        grid = self.grid(x, key) if grid is None else grid
        x = self.basis(x, key)
        encode_scale = self.global_scale(grid["g"])
        if self.four_over_six:
            codes, scales = self.scale_choice.choose(x, grid["s"], grid["g"], encode_scale)
            return {"q": pack_nibbles(codes), "s": scales, "g": grid["g"]}
        sixth = encode_scale * torch.full_like(encode_scale, 1.0 / self.most)
        scales = E4M3.encode((grid["s"] * sixth).clamp(max=FLT_MAX))
        scaled = x * expand_tiles(block_encode_scale(scales, encode_scale), x.shape, *self.tile)
        codes = round_four(scaled, self.element, sr=self.sr, key=key, name=self.text)
        if self.eden:
            words = segment_words(key, *x.shape, x.device)
            scales = eden.corrected(scaled, codes, scales, size=self.rht, words=words)
        return {"q": pack_nibbles(codes), "s": scales, "g": grid["g"]}

    def global_scale(self, amax: Tensor) -> Tensor:
        """Return S_enc of each global amax, float32, in the same shape."""
        scale = divide(self.divisor, amax).clamp(max=FLT_MAX)
        return torch.where((amax == 0) | (scale == 0), 1.0, scale)

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        """Return values in the basis of the codes: with +rht they stay transformed, as the GEMM takes them."""
        return self.element.decode(self.codes(buffers)) * expand_tiles(self.value_scales(buffers), shape, *self.tile)

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        matrix = self.element.decode(self.codes(buffers)) * expand_tiles(self.scales(buffers), shape, *self.tile)
        return ExactOperand(matrix.bfloat16(), buffers["g"], self.divisor)

    def scales(self, buffers: Buffers) -> Tensor:
        return E4M3.decode(buffers["s"])

    def value_scales(self, buffers: Buffers) -> Tensor:
        """Return fl(fl(sf * A) * fl(1 / m)) of every block."""
        amax = buffers["g"]
        return self.scales(buffers) * amax * torch.full_like(amax, 1.0 / self.divisor)

    def basis(self, x: Tensor, key: RngKey | None = None) -> Tensor:
        return transformed(self, x, key).float()

    def codes(self, buffers: Buffers) -> Tensor:
        return unpack_nibbles(buffers["q"])


def block_encode_scale(scales: Tensor, encode_scale: Tensor) -> Tensor:
    """Return min(fl(1 / fl(f32(sf) * fl(1 / S_enc))), FLT_MAX) for E4M3 scale bytes; sf = 0 gives FLT_MAX."""
    return divide(1.0, E4M3.decode(scales) * divide(1.0, encode_scale)).clamp(max=FLT_MAX)


def _sum_tiles(error: Tensor, *, two_d: bool) -> Tensor:
    """Return sequential float32 sums over each row of 16; with two_d then summed as a tree over the tile's rows."""
    rows, cols = error.shape
    groups = error.view(rows, cols // BLOCK, BLOCK)
    total = torch.zeros_like(groups[:, :, 0])
    for i in range(BLOCK):
        total = total + groups[:, :, i]
    if not two_d:
        return total
    down = -(-rows // BLOCK)
    tiles = torch.nn.functional.pad(total, (0, 0, 0, down * BLOCK - rows)).view(down, BLOCK, cols // BLOCK)
    for offset in (8, 4, 2, 1):
        tiles = tiles[:, :offset] + tiles[:, offset : 2 * offset]
    return tiles[:, 0]


def round_four(scaled: Tensor, element: Element, *, sr: bool, key: RngKey | None, name: str) -> Tensor:
    """Return uint8 codes of 4 bits of scaled float32 [rows, cols]: RNE, or with sr stochastic under the key's bytes.

    ValueError, which names the format, for sr without a key.
    """
    if not sr:
        return element.encode(scaled)
    if key is None:
        raise ValueError(f"{name}: encode needs an RngKey")
    bits = random_bytes(key, *scaled.shape, scaled.device)
    return stochastic_e2m1(scaled, bits) if element == E2M1 else stochastic_e1m2(scaled, bits)


def stochastic_e1m2(x: Tensor, random: Tensor) -> Tensor:
    """Return E1M2 codes of float32 x: stochastic_e2m1 on the grid whose steps are all 0.5, saturating at 3.5."""
    t = x.abs() + random.float() * (0.5 / 256)
    rounded = (torch.floor(t * 2) / 2).clamp(max=3.5)
    return E1M2.encode(torch.where(torch.isnan(x), 3.5, torch.copysign(rounded, x)))


def stochastic_e2m1(x: Tensor, random: Tensor) -> Tensor:
    """Return E2M1 codes of float32 x, rounded up with probability distance / step, saturating at 6.

    random: uint8 bytes of x's shape. t = |x| + random / 256 * step(|x|) in one rounding; result = min(floor(t /
    step(t)) * step(t), 6); NaN -> +6. The step is 0.5 below 2, 1 below 4, 2 above. Source: TransformerEngine
    common/util/ptx.cuh:532 at d0067d0da6cb.
    """
    magnitude = x.abs()
    t = magnitude + random.float() * (_step(magnitude) / 256)
    rounded = (torch.floor(t / _step(t)) * _step(t)).clamp(max=6.0)
    return E2M1.encode(torch.where(torch.isnan(x), 6.0, torch.copysign(rounded, x)))


def _step(magnitude: Tensor) -> Tensor:
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
