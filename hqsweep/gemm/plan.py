"""GemmPlan: how a device computes the product of two formats, for one matrix or for a group of experts.

A plan depends only on the request and the device's compute capability. So a machine without a GPU can print, and test,
another machine's plan. Manifests contain its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hqsweep.formats import Format
from hqsweep.recipe.pairs import OUTSIDE

Capability = tuple[int, int] | None
"""Compute capability of a GPU; None for a CPU."""
UNTRIED = (10,)
"""Majors whose native products were written from documentation and have not run yet."""
GROUPED_MAJORS = (9, 10)
"""Compute capabilities with a kernel for torch._grouped_mm; elsewhere it is a loop that waits for the splits."""
NATIVE_MAJORS = (9,)
"""Capabilities for which torch._scaled_grouped_mm takes E4M3 codes with per-row scales."""
ALIGNMENT = 8
"""Both kernels need strides in multiples of 16 bytes: this many bfloat16 elements, or twice as many codes."""


@dataclass(frozen=True, kw_only=True)
class GroupGemm:
    """The facts about a GEMM over experts that are known before it runs."""

    gemm: str = "fprop"
    """ "fprop", "dgrad" or "wgrad"."""
    sizes: tuple[int, int] = (2 * ALIGNMENT, 2 * ALIGNMENT)
    """In and out features."""
    out_dtype: torch.dtype = torch.bfloat16
    """dtype of the products: float32 for wgrad into FP32 weights."""
    host_splits: bool = True
    """Whether the host knows the splits."""
    equal_splits: bool = False
    """Whether the host knows that the splits are equal, and not 0."""


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """How a GEMM is computed."""

    a: Format
    b: Format
    capability: Capability
    mode: str
    """The recipe's gemm: exact, strict or native."""
    group: GroupGemm | None = None
    """The GEMM over experts; None: one matrix times one matrix."""
    kernel: Literal["torch.bmm", "torch._grouped_mm", "torch._scaled_grouped_mm"] | None = None
    """The one kernel for all experts; None: one product per matrix."""

    @property
    def one_kernel(self) -> bool:
        """Whether one kernel computes all experts."""
        return self.kernel is not None

    def __str__(self) -> str:
        if self.kernel == "torch._scaled_grouped_mm":
            return f"native: tensor cores of sm_90 through {self.kernel}, scales of experts as those of rows"
        if self.kernel is not None:
            return self._text_of_kernel()
        return f"{self._text_of_matrix()}, for each expert" if self.group else self._text_of_matrix()

    def _text_of_matrix(self) -> str:
        """Return the text for one matrix. High precision has one plan in every mode."""
        if self.mode == "native" and not self.a.high_precision:
            return plan_text(self.capability)
        operands = "bf16" if self.a.fits_bf16 and self.b.fits_bf16 else "fp32"
        compute = "float32 GEMM"
        if self.capability is not None:
            tensor_cores = "bfloat16 tensor cores, float32 accumulation"
            compute = tensor_cores if operands == "bf16" else f"{compute} (TF32 off)"
        return f"exact: {operands} operands, {compute}"

    def _text_of_kernel(self) -> str:
        factors = any(format.amax_name for format in (self.a, self.b))
        stored, where = ", stored in bfloat16", ""
        if self.kernel == "torch.bmm":
            where = " over experts of equal size"
            stored = stored if factors and self.group.out_dtype == torch.bfloat16 else ""
        text = f"exact: bf16 operands, {self.kernel}{where}, float32 accumulation{stored}"
        return f"{text} before the factors of experts" if stored and factors else text


def plan_text(capability: tuple[int, int]) -> str:
    """Return a manifest's text for a product of gemm=native without fault()."""
    tried = "" if capability[0] not in UNTRIED else ", not yet run on such hardware"
    return f"native: tensor cores of sm_{capability[0]}{capability[1]} through torch._scaled_mm{tried}"


def gemm_plan(
    a: Format, b: Format, capability: Capability, mode: str = "exact", group: GroupGemm | None = None
) -> GemmPlan:
    """Return the plan for operands of these formats. capability: the GPU's, None for a CPU; group: None for one
    matrix."""
    kernel = None
    if group is not None:
        kernel = _native_kernel(a, b, capability, group) if mode == "native" else _kernel(a, b, capability, group)
    return GemmPlan(a=a, b=b, capability=capability, mode=mode, group=group, kernel=kernel)


def _kernel(a: Format, b: Format, capability: Capability, group: GroupGemm) -> str | None:
    if capability is None or not (a.fits_bf16 and b.fits_bf16):
        return None
    if group.equal_splits:
        return "torch.bmm"
    wide = group.out_dtype == torch.float32 and group.host_splits
    fits = not wide and all(size % ALIGNMENT == 0 for size in group.sizes)
    return "torch._grouped_mm" if fits and _is_among(capability, GROUPED_MAJORS) else None


def _native_kernel(a: Format, b: Format, capability: Capability, group: GroupGemm) -> str | None:
    rows_of_codes = group.gemm != "wgrad" and group.out_dtype == torch.bfloat16
    rows_of_codes = rows_of_codes and all(f.scaling in OUTSIDE and f.element_name == "e4m3" for f in (a, b))
    fits = rows_of_codes and all(size % (2 * ALIGNMENT) == 0 for size in group.sizes)
    return "torch._scaled_grouped_mm" if fits and _is_among(capability, NATIVE_MAJORS) else None


def _is_among(capability: Capability, majors: Sequence[int]) -> bool:
    return capability is not None and capability[0] in majors
