"""FP8 with delayed scaling: one scale for the tensor, from the amaxes of earlier steps.

The format says how a tensor is encoded under a given amax; quant/delayed.py remembers the amaxes. The arithmetic is
that of TransformerEngine's fused update (common/recipe/delayed_scaling.cu, kernel_bulk at d0067d0da6cb) with margin 0.
TransformerEngine stores the scale; this stores the amax that the scale comes from: scale = S(amax), which is 1 for
amax 0, as at the first step, and a scale that does not change is an amax that does not change.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats.base import Buffers
from hqsweep.formats.fp8 import Fp8PerTensor
from hqsweep.formats.random import RngKey


@dataclass(frozen=True, kw_only=True)
class Fp8Delayed(Fp8PerTensor):
    """As fp8_current, but under the amax of a grid, {"s": float32 [1, 1]}: values beyond it saturate."""

    name = "fp8_delayed"
    delayed = True
    OPTIONS: ClassVar = {
        "e5m2": {"element_name": "e5m2"},
        "most_recent": {"most_recent": True},
        "local_amax": {"local_amax": True},
    }
    NUMBERED: ClassVar = {"history": "history"}

    most_recent: bool = False
    """The amax of the last step instead of the largest of the history."""
    local_amax: bool = False
    """Every process of a torch.distributed training has amaxes of its own, instead of the largest over all of them."""
    history: int = 1024
    """How many steps are remembered, the present one included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 1:
            raise UserError(f"{self.name}: the history has {self.history} steps; allowed is a whole number >= 1")

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        if grid is None:
            raise UserError(f"{self}: encode needs the amax that the state of a slot remembers; give it as grid['s']")
        return super().encode(x, grid, key)


def end_step(history: Tensor, amax: Tensor, *, most_recent: bool) -> tuple[Tensor, Tensor]:
    """History and amax of the next step. No device waits; nothing is written.

    history: float32 [..., L], entry 0 the amax of the step that ends, the last entry that of the step before, as the
    oldest is overwritten. amax: float32 of any shape with one element for each history, the ones in use.
        last = history[0]; without one (0) everything stays
        history[i] = history[i + 1] for 0 < i < L - 1, history[L - 1] = last, history[0] = 0
        amax = last (most_recent), or the largest of the old history, NaN ignored; unless that is 0, inf or NaN
    """
    last, rolled = history[..., 0], history.roll(-1, dims=-1)
    rolled[..., :1].zero_()  # an assigned number would be copied to the device, which waits
    candidate = last if most_recent else history.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1)
    recorded = last != 0
    usable = (recorded & (candidate > 0) & candidate.isfinite()).view(amax.shape)
    new_amax = torch.where(usable, candidate.view(amax.shape), amax)
    return torch.where(recorded[..., None], rolled, history), new_amax
