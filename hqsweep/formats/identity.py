"""Identity: bf16, fp16 and fp32 as formats, so that high precision is one more choice and not a special case."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.formats.base import Buffer, Buffers, ExactOperand, Format
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import IDENTITY
from hqsweep.memo import cached_property

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Identity(Format):
    """The input rounded (RNE) to `name`'s dtype; no scale. The GEMM runs on these values with FP32 accumulation.

    Nothing is copied that need not be: an input of that dtype is held as it is, with its strides, so that both
    directions of a tensor share its storage.
    """

    family = IDENTITY
    name: str = "bf16"
    high_precision = True

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def element_name(self) -> str:
        return self.name

    @property
    def fits_bf16(self) -> bool:
        return self.name == "bf16"

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        return {"q": Buffer(1, 1, self.dtype)}

    @property
    def element_bits(self) -> int:
        return self.dtype.itemsize * 8

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        return {"q": x.to(self.dtype)}

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        return buffers["q"].float()

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        """The held values themselves: bfloat16, or float32 for fp16 and fp32 (neither fits in bfloat16)."""
        held = buffers["q"]
        return ExactOperand(held if self.fits_bf16 else held.float())
