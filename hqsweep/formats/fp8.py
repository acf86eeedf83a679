"""FP8 with float32 scales: one per tensor (current or delayed scaling), per row, per 1x128 block, or per 128x128 tile.

scale = S(amax), computed by fp8_scale(); code = RNE(fl(x * scale)), saturating; scale_inv = fl(1 / scale);
value = fl(code * scale_inv). scale_inv is stored. S = fl(max / amax), with max 448 (E4M3) or 57344 (E5M2). It is
truncated to a power of two if scales are powers of two, and 1 for an amax of 0 or inf. The arithmetic is
TransformerEngine's (common/recipe/recipe_common.cuh, current_scaling.cu,
transpose/quantize_transpose_{vector,square}_blockwise.cu at d0067d0da6cb). fp8_row is torchao's rowwise scaling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats.base import (
    FLT_MAX,
    WHOLE,
    Buffer,
    Buffers,
    ExactOperand,
    Format,
    divide,
    expand_tiles,
    fp8_scale,
    tile_amax,
)
from hqsweep.formats.elements import ELEMENTS, Element
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import FP8_BLOCK, FP8_CURRENT, FP8_DELAYED, FP8_ROW
from hqsweep.memo import cached_property


@dataclass(frozen=True, kw_only=True)
class _ScaledFp8(Format):
    """The common part of all scalings: codes q (uint8) and float32 scale_inv s over tiles."""

    element_name: str = "e4m3"
    """The element of the codes."""
    pow2 = False  # subclasses override it, and amax_epsilon, by fields
    amax_epsilon = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.amax_epsilon < FLT_MAX:
            raise UserError(f"{self.name}: amax epsilon is {self.amax_epsilon}; allowed is a finite number >= 0")

    @property
    def element(self) -> Element:
        return ELEMENTS[self.element_name]

    @property
    def element_bits(self) -> int:
        return 8

    @property
    def kernel_fields(self) -> dict[str, object]:
        return {
            "family": "current" if self.amax_name else "block",
            "element": self.element_name,
            "pow2": self.pow2,
            "amax_epsilon": self.amax_epsilon,
        }

    def _inf_value(self, dtype: torch.dtype) -> float:
        raise NotImplementedError

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        return {"q": Buffer(1, 1, torch.uint8), "s": Buffer(*self.tile, torch.float32)}

    def grid(self, x: Tensor, key: RngKey | None = None) -> dict[str, Tensor]:
        return {"s": tile_amax(x, *self.tile)}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        amax = (self.grid(x) if grid is None else grid)["s"]
        scale = fp8_scale(
            amax,
            fp8_max=self.element.max,
            epsilon=self.amax_epsilon,
            pow2=self.pow2,
            inf_value=self._inf_value(x.dtype),
        )
        codes = self.element.encode(x.float() * expand_tiles(scale, x.shape, *self.tile))
        return {"q": codes, "s": divide(1.0, scale)}

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        return self.element.decode(buffers["q"]) * expand_tiles(buffers["s"], shape, *self.tile)

    def scales(self, buffers: Buffers) -> Tensor:
        return buffers["s"]

    def codes(self, buffers: Buffers) -> Tensor:
        return buffers["q"]


@dataclass(frozen=True, kw_only=True)
class Fp8PerTensor(_ScaledFp8):
    """One scale per tensor. operand(): matrix = codes (always exact), factor = scale_inv."""

    scaling = "tensor"
    amax_name = "s"
    tile = (WHOLE, WHOLE)

    def _inf_value(self, dtype: torch.dtype) -> float:
        return FLT_MAX

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        return ExactOperand(self.element.decode(buffers["q"]).bfloat16(), buffers["s"])


@dataclass(frozen=True, kw_only=True)
class Fp8Current(Fp8PerTensor):
    """One scale, from the tensor's own amax."""

    name = "fp8_current"
    family = FP8_CURRENT

    pow2: bool = False
    """Whether the scale is truncated to a power of two."""
    amax_epsilon: float = 0.0
    """The least amax: smaller ones are raised to it."""


@dataclass(frozen=True, kw_only=True)
class Fp8Block(_ScaledFp8):
    """One scale per 1x128 block, or per 128x128 tile with two_d. Partial blocks at the edges use the existing elements.

    operand(): with pow2 scales (the default) code * scale_inv in bfloat16. It is exact if scale_inv lies in the
    element's exact_scale_range (block amax from about 2^-116 for E4M3, 2^-102 for E5M2); outside it is rounded to
    bfloat16. With fp32 scales the product does not fit in bfloat16, so the matrix is float32, fl(code * scale_inv), as
    in decode.
    """

    name = "fp8_block"
    family, scaling = FP8_BLOCK, FP8_BLOCK.scaling

    pow2: bool = True
    """Whether scales are truncated to powers of two."""
    amax_epsilon: float = 0.0
    """The least amax: smaller ones are raised to it."""
    two_d: bool = False
    """Whether scales cover 128x128 tiles."""

    @property
    def tile(self) -> tuple[int, int]:
        return (128, 128) if self.two_d else (1, 128)

    @property
    def fits_bf16(self) -> bool:
        return self.pow2

    def _inf_value(self, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).max

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        matrix = self.decode(buffers, shape)
        return ExactOperand(matrix.bfloat16() if self.fits_bf16 else matrix)


@dataclass(frozen=True, kw_only=True)
class Fp8Row(_ScaledFp8):
    """One scale per row of the operand: per token for a rowwise operand, per column of the tensor for a columnwise one.

    The arithmetic is torchao's rowwise scaling (float8/float8_utils.py, amax_to_scale, torchao 0.18): the least amax is
    1e-12, and overflow saturates. With +pow2 it is the recipe `rowwise` of torchao. Two cases differ. torchao makes a
    row with a NaN or an inf NaN; here a NaN does not count in amax, and an amax of inf has scale 1. torchao truncates
    by a float32 log2, which rounds scales just below a power of two up to it.
    operand(): matrix = codes (always exact), factor = scale_inv of each row.
    """

    name = "fp8_row"
    family, scaling = FP8_ROW, FP8_ROW.scaling
    amax_name = "s"
    tile = (1, WHOLE)
    row_scaled = True

    pow2: bool = False
    """Whether scales are truncated to powers of two."""
    amax_epsilon: float = 1e-12
    """The least amax: smaller ones are raised to it."""

    @property
    def kernel_fields(self) -> dict[str, object]:
        return super().kernel_fields | {"row_scaled": True}

    def _inf_value(self, dtype: torch.dtype) -> float:
        return FLT_MAX

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        return ExactOperand(self.element.decode(buffers["q"]).bfloat16(), buffers["s"])


@dataclass(frozen=True, kw_only=True)
class Fp8Delayed(Fp8PerTensor):
    """Fp8Current under a given amax, {"s": float32 [1, 1]}: values beyond it saturate.

    quant/delayed.py remembers the amaxes of earlier steps, with the arithmetic of TransformerEngine's fused update
    (common/recipe/delayed_scaling.cu, kernel_bulk at d0067d0da6cb) and margin 0. TransformerEngine stores the scale.
    Here the amax behind it is stored: 0 at the first step, where the scale is 1.
    """

    name = "fp8_delayed"
    delayed = True
    family = FP8_DELAYED

    most_recent: bool = False
    """Whether the last step's amax decides, instead of the largest in the history."""
    local_amax: bool = False
    """Whether each process of a torch.distributed training keeps its own amaxes, instead of the maximum over all
    processes."""
    skip_nonfinite: bool = False
    """Whether an amax of inf or NaN is ignored, so that finite amaxes keep setting the scale. TransformerEngine keeps
    it in the history, and the scale does not change while it is there."""
    history: int = 1024
    """Number of remembered steps, the present one included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 1:
            raise UserError(f"{self.name}: the history has {self.history} steps; allowed is a whole number >= 1")

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        if grid is None:
            raise UserError(f"{self}: encode needs the amax that the state of a slot remembers; give it as grid['s']")
        return super().encode(x, grid, key)


def end_step(
    history: Tensor, amax: Tensor, *, most_recent: bool, skip_nonfinite: bool = False
) -> tuple[Tensor, Tensor]:
    """Return history and amax of the next step. No device waits; nothing is written.

    history: float32 [..., L]; entry 0 is the amax of the ending step, the last entry belongs to the step before, and
    the oldest is overwritten. amax: float32 with one element per history, the amaxes in use.
        with skip_nonfinite, first history[i] = 0 where it is inf or NaN
        last = history[0]; if it is 0, nothing changes
        history[i] = history[i + 1] for 0 < i < L - 1, history[L - 1] = last, history[0] = 0
        amax = last (most_recent), or the maximum of the old history, NaN ignored; unless that is 0, inf or NaN
    """
    if skip_nonfinite:
        history = history.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    last, rolled = history[..., 0], history.roll(-1, dims=-1)
    rolled[..., :1].zero_()  # assigning a number would copy it to the device and wait
    candidate = last if most_recent else history.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1)
    recorded = last != 0
    usable = (recorded & (candidate > 0) & candidate.isfinite()).view(amax.shape)
    new_amax = torch.where(usable, candidate.view(amax.shape), amax)
    return torch.where(recorded[..., None], rolled, history), new_amax
