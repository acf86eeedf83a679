"""Block scales of NVFP4: how one multiplies values, and 4over6, which maps the block amax to 6 or to 4.

TransformerEngine common/cast/nvfp4/quantize_4over6_nvfp4.cuh at d0067d0da6cb: both candidates are encoded, their
errors are summed in float32 element by element in index order, and 4 wins only when strictly better. With 16x16 tiles
the 16 row sums are added as a tree with offsets 8, 4, 2, 1 (with rows and columns as encode sees them, so a near tie
can fall differently for the transpose). Idea: Cook et al., Four Over Six (arXiv 2512.02010).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats.elements import E2M1, E4M3
from hqsweep.formats.tiles import FLT_MAX, divide, expand_tiles

BLOCK = 16


def block_encode_scale(scales: Tensor, encode_scale: Tensor) -> Tensor:
    """min(fl(1 / fl(f32(sf) * fl(1 / S_enc))), FLT_MAX) of E4M3 scale bytes; sf = 0 gives FLT_MAX."""
    return divide(1.0, E4M3.decode(scales) * divide(1.0, encode_scale)).clamp(max=FLT_MAX)


@dataclass(frozen=True, kw_only=True)
class FourOverSix:
    """How 4over6 decides: the tiles that share a scale, the error that it compares, and the divisor m of values."""

    tile: tuple[int, int]
    error_mode: str
    """The error that is compared: mae or mse."""
    fast_error: bool
    """Whether float16 products of code and scale are compared with x * S_enc, without the division."""
    divisor: float

    def choose(self, x: Tensor, blocks: Tensor, amax: Tensor, encode_scale: Tensor) -> tuple[Tensor, Tensor]:
        """float32 x [rows, cols], block amaxes, global amax and S_enc -> (codes [rows, cols], E4M3 scale bytes)."""
        base = blocks / torch.full_like(blocks, 6.0) * encode_scale
        six, four = (E4M3.encode(b.clamp(max=448.0)) for b in (base, base * torch.full_like(base, 1.5)))
        code6, error6 = self._candidate(x, six, amax, encode_scale)
        code4, error4 = self._candidate(x, four, amax, encode_scale)
        take_four = error4 < error6
        mask = expand_tiles(take_four, x.shape, *self.tile)
        return torch.where(mask, code4, code6), torch.where(take_four, four, six)

    def _candidate(self, x: Tensor, scales: Tensor, amax: Tensor, encode_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of x under these block scales, and the error of every tile."""
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


def _sum_tiles(error: Tensor, *, two_d: bool) -> Tensor:
    """Sequential float32 sum over each row of 16; with two_d then a tree over the tile's rows."""
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
