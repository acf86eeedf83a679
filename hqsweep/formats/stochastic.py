"""Rounding to E2M1: RNE, or stochastically by keyed random bytes."""

import torch
from torch import Tensor

from hqsweep.formats.elements import E2M1
from hqsweep.formats.random import RngKey, random_bytes


def round_e2m1(scaled: Tensor, *, sr: bool, key: RngKey | None, name: str) -> Tensor:
    """float32 [rows, cols], already scaled -> uint8 E2M1 codes of that shape: RNE, or with sr stochastic_e2m1 under the
    key's bytes. ValueError, which names the format, for sr without a key."""
    if not sr:
        return E2M1.encode(scaled)
    if key is None:
        raise ValueError(f"{name}: encode needs an RngKey")
    return stochastic_e2m1(scaled, random_bytes(key, *scaled.shape, scaled.device))


def stochastic_e2m1(x: Tensor, random: Tensor) -> Tensor:
    """float32 and uint8 random bytes of one shape -> E2M1 codes; up with probability distance / step, saturating at 6.

    t = |x| + random / 256 * step(|x|) in one rounding; result = min(floor(t / step(t)) * step(t), 6); NaN -> +6. The
    step is 0.5 below 2, 1 below 4, 2 above. Source: TransformerEngine common/util/ptx.cuh:532 at d0067d0da6cb.
    """
    magnitude = x.abs()
    t = magnitude + random.float() * (_step(magnitude) / 256)
    rounded = (torch.floor(t / _step(t)) * _step(t)).clamp(max=6.0)
    return E2M1.encode(torch.where(torch.isnan(x), 6.0, torch.copysign(rounded, x)))


def _step(magnitude: Tensor) -> Tensor:
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
