"""MS-EDEN, the unbiased rounding of NVFP4's +eden (Quartet II, Panferov et al., arXiv 2601.22813).

x is transformed over groups of n elements (formats/hadamard.py), with signs that are drawn anew in every step. Elements
are rounded to nearest, and stochastic rounding falls on the block scales alone. With nvfp4's S_enc, b and s, and
  v = fl(6 / (0.93 * 17/16)) = 6.0721..., m = 256 * v:  amaxes map to v, a little beyond 6, and scales to 256 at most;
  sf = E4M3(fl(b * fl(S_enc * fl(1 / v))));   t = fl(x * s);   q = E2M1(t), both as in nvfp4;
the norm of a group is put right by the factor of EDEN (Vargaftik et al., arXiv 2108.08842), S = <x, x> / <x, Q(x)>:
  p = sum t * t, r = sum t * q, float32 sums over the 16 elements of a block in index order; 0 for sf = 0;
  P = sum fl(sf^2 * p), R = sum fl(sf^2 * r) over the blocks of a group: neighbours first, then pairs of neighbours, ...
  S = fl(P / R), or 1 if that is not positive and finite;
  stored scale = SR(fl(sf * S));   value = q * stored scale * A / m.
SR(z) is E4M3 and rounds up with probability distance / step. It adds 20 random bits, the low bits of the first word of
the block's Philox draw (formats/random.py), below the last kept bit, and truncates; it saturates at 448. Below 2^-6 the
step is 2^-9, and bits of z below 2^-29 are cut off. Under a uniformly random rotation the mean of S Q(x) is x. Random
signs before a Hadamard transform come near: a group with few outliers keeps a bias, of about 1 % of the squared error.

Quartet II's kernels (IST-DASLab/Quartet-II) leave out sf^2 in both sums, as if all blocks of a group had one scale.
After the transform their scales are nearly equal; here S is the ratio of the values.
"""

import torch
from torch import Tensor

from hqsweep.formats.elements import E2M1, E4M3

MAX = float(torch.tensor(6 / (0.93 * 17 / 16)))
"""v: the number that a block's amax maps to."""
SCALE_MAX = 256
"""The largest scale before the correction, which leaves room for S up to 1.75."""
_BLOCK = 16
_DRAWN = 20
"""Random bits of a scale: as many as E4M3 drops of a float32 mantissa."""


def corrected(scaled: Tensor, codes: Tensor, scales: Tensor, *, size: int, words: Tensor) -> Tensor:
    """Return the E4M3 bytes of the corrected scales.

    scaled, codes: t, float32, and the codes of q, uint8, [rows, cols]. scales: the bytes of sf [rows, cols / 16]. size:
    elements of a group. words: random words of the blocks, int64 [rows, cols / 16].
    """
    sf = E4M3.decode(scales)
    factor = _factor(scaled, E2M1.decode(codes), sf, size // _BLOCK)
    return stochastic_e4m3(sf * factor.repeat_interleave(size // _BLOCK, dim=1), words)


def _factor(scaled: Tensor, values: Tensor, sf: Tensor, blocks: int) -> Tensor:
    """Return S of every group, float32 [rows, groups]."""
    rows, across = sf.shape
    t, q = (each.view(rows, across, _BLOCK) for each in (scaled, values))
    own, with_codes = torch.zeros_like(sf), torch.zeros_like(sf)
    for i in range(_BLOCK):
        own = own + t[:, :, i] * t[:, :, i]
        with_codes = with_codes + t[:, :, i] * q[:, :, i]
    sums = torch.stack([torch.where(sf == 0, 0.0, sf * sf * each) for each in (own, with_codes)])
    sums = sums.view(2, rows, across // blocks, blocks)
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    factor = sums[0, ..., 0] / sums[1, ..., 0]
    return torch.where((factor > 0) & (factor < torch.inf), factor, 1.0)


def stochastic_e4m3(x: Tensor, words: Tensor) -> Tensor:
    """Return the E4M3 bytes of float32 x >= 0, rounded by the low 20 bits of the words, int64 of x's shape."""
    drawn = words & (1 << _DRAWN) - 1
    normal = (x.view(torch.int32).long() + drawn >> _DRAWN) - (120 << 3)
    small = (x.clamp(max=2.0**-6) * 2.0**29).long() + drawn >> _DRAWN
    return torch.where(x < 2.0**-6, small, normal).clamp(max=0x7E).to(torch.uint8)
