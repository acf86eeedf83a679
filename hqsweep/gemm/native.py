"""gemm=native: products on the machine's tensor cores, from codes and scales, through torch._scaled_mm.

A table by compute capability says which products run. All others are refused before anything runs. Nothing falls back
to gemm=exact, except some products of experts, whose plan says so (gemm_plan). sm_90 was measured (benchmarks/gemm.py).
sm_100 follows the documented layouts and has not run yet.

    sm_89          per-tensor FP8 with per-tensor FP8
    sm_90          the same, FP8 with a scale per row, also with per-tensor FP8, and block FP8: 1x128 with 1x128 or
                   128x128
    sm_100, sm_103 per-tensor FP8, FP8 with a scale per row, MXFP8 and NVFP4, each with its own kind
    all            two equal high-precision dtypes
E5M2 never meets E5M2.

A plan says for each GEMM over experts which way its products run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import NAMES, ExactOperand, Format, parse
from hqsweep.gemm.exact import epilogue, mm_t
from hqsweep.ops.library import operator
from hqsweep.quant.operand import Operand
from hqsweep.recipe.pairs import OUTSIDE, same_scaling
from hqsweep.torch_private import scaled_mm

Capability = tuple[int, int] | None
"""Compute capability of a GPU; None for a CPU."""
UNTRIED = (10,)
"""Majors whose native products were written from documentation and have not run yet."""
GROUPED_MAJORS = (9, 10)
"""Compute capabilities with a kernel for torch._grouped_mm; elsewhere it is a loop that waits for the splits."""
NATIVE_MAJORS = (9,)
"""Capabilities for which torch._scaled_grouped_mm takes E4M3 codes with per-row scales."""
STEP = 8
"""Both kernels need strides in multiples of 16 bytes: this many bfloat16 elements, or twice as many codes."""


@dataclass(frozen=True, kw_only=True)
class GroupGemm:
    """The facts about a GEMM over experts that are known before it runs."""

    gemm: str = "fprop"
    """ "fprop", "dgrad" or "wgrad"."""
    sizes: tuple[int, int] = (2 * STEP, 2 * STEP)
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
    """Return the plan for operands of these formats. capability: the GPU's, None for a CPU; group: None for one matrix.

    Native products of experts without a kernel of their own are loops. Where only the GPU knows the splits, a loop
    would wait for the host, and one kernel multiplies exact operands instead.
    """
    kernel = None
    if group is not None:
        kernel = _native_kernel(a, b, capability, group) if mode == "native" else None
        if kernel is None and (mode != "native" or not group.host_splits):
            kernel = _kernel(a, b, capability, group)
    return GemmPlan(a=a, b=b, capability=capability, mode=mode, group=group, kernel=kernel)


def _kernel(a: Format, b: Format, capability: Capability, group: GroupGemm) -> str | None:
    if capability is None or not (a.fits_bf16 and b.fits_bf16):
        return None
    if group.equal_splits:
        return "torch.bmm"
    wide = group.out_dtype == torch.float32 and group.host_splits
    fits = not wide and all(size % STEP == 0 for size in group.sizes)
    return "torch._grouped_mm" if fits and _is_among(capability, GROUPED_MAJORS) else None


def _native_kernel(a: Format, b: Format, capability: Capability, group: GroupGemm) -> str | None:
    rows_of_codes = group.gemm != "wgrad" and group.out_dtype == torch.bfloat16
    rows_of_codes = rows_of_codes and all(f.scaling in OUTSIDE and f.element_name == "e4m3" for f in (a, b))
    fits = rows_of_codes and all(size % (2 * STEP) == 0 for size in group.sizes)
    return "torch._scaled_grouped_mm" if fits and _is_among(capability, NATIVE_MAJORS) else None


def _is_among(capability: Capability, majors: Sequence[int]) -> bool:
    return capability is not None and capability[0] in majors


CUDA_KINDS: dict[int, tuple[str, ...]] = {
    8: ("tensor",),
    9: ("tensor", "row", "block"),
    10: ("tensor", "row", "mx", "nvfp4"),
}
"""Major compute capability -> scalings (Format.scaling) with a native product; of 8 only 8.9."""
ALIGNMENT = 16
"""cuBLAS needs the address of a scale at a multiple of this many bytes."""
TILES = 4
"""cuBLAS reads rows of scales of 128x128 tiles at multiples of this many scales."""
SCALING_TYPES = (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
"""By Format.two_d."""
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def capability_of(device: torch.device | str) -> Capability:
    """Return the compute capability of a CUDA device; None for a CPU."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_fault(capability: Capability) -> str | None:
    """Return why a device (None: a CPU) has no tensor cores for low precision, or None."""
    if capability is None or capability < (8, 9):
        return "gemm=native needs a GPU of compute capability 8.9 or later"
    return None


def fault(a: Format, b: Format, capability: Capability) -> str | None:
    """Return why a device's tensor cores do not multiply the two formats, or None."""
    if a.high_precision or b.high_precision:
        return None if a == b else "a GEMM takes one high-precision dtype"
    if missing := device_fault(capability):
        return missing
    kinds = CUDA_KINDS.get(capability[0], ())
    for format in (a, b):
        if not _has_native(format, kinds):
            names = ", ".join(sorted(_names(kinds))) or "none"
            return f"sm_{capability[0]}{capability[1]} has no product for {format}; it has: {names}"
    if not same_scaling(a, b):
        return "their scaling modes differ"
    if a.scaling == "block" and a.two_d and b.two_d:
        return "128x128 tiles on both sides have no product"
    if a.element_name == b.element_name == "e5m2":
        return "E5M2 does not meet E5M2"
    return None


def _has_native(format: Format, kinds: tuple[str, ...]) -> bool:
    return format.scaling in kinds and (format.scaling == "nvfp4" or format.element_name in FLOAT8)


def _names(kinds: tuple[str, ...]) -> list[str]:
    return [name for name in NAMES if _has_native(parse(name), kinds)]


def shape_fault(a: Format, b: Format, m: int, n: int, k: int) -> str | None:
    """Return why [m, k] x [n, k] does not fit the tensor cores' alignment, or None."""
    if a.high_precision:
        return None
    rows = {"rows of the first operand": m} if a.scaling == "block" else {}
    sizes = rows | {"rows of the second operand": n, "the contracted axis": k}
    uneven = [f"{name} ({size})" for name, size in sizes.items() if size % 16]
    if uneven:
        return f"tensor cores take multiples of 16, which {' and '.join(uneven)} is not"
    if _has_uneven_tiles(a, b, k) and "e5m2" in (a.element_name, b.element_name):
        return f"beside E5M2 tensor cores take a multiple of {TILES} tiles of 128x128 in a row; {k} columns have others"
    return None


def _has_uneven_tiles(a: Format, b: Format, k: int) -> bool:
    """Return whether rows of 128x128 tiles need padding. torch.nn.functional.scaled_mm takes them so, for E4M3
    alone."""
    return a.scaling == "block" and (a.two_d or b.two_d) and -(-k // 128) % TILES != 0


def refusal(capability: Capability, a: Format, b: Format, m: int, n: int, k: int) -> str | None:
    """Return why a device's tensor cores do not multiply [m, k] by [n, k] transposed, or None."""
    return fault(a, b, capability) or shape_fault(a, b, m, n, k)


def mm_t_native(a: Operand, b: Operand, *, out_dtype: torch.dtype) -> Tensor:
    """Return a [m, k] times b [n, k] transposed, [m, n] in out_dtype. UserError with the refusal, if there is one.

    The product of codes and scales accumulates in the tensor core's own precision (no fast accumulation). NVFP4's
    global factors are applied to the float32 product, as in gemm=exact.
    """
    capability = capability_of(next(iter(a.buffers.values())).device)
    (m, k), (n, _) = a.shape, b.shape
    refused = refusal(capability, a.format, b.format, m, n, k)
    if refused:
        raise UserError(f"{a.format} x {b.format}: {refused}")
    if a.format.high_precision:
        return mm_t(a, b, out_dtype=out_dtype)
    (left, left_scale), (right, right_scale) = map(_operand, (a, b))
    if "row" in (a.format.scaling, b.format.scaling):
        left_scale, right_scale = (_of_rows(s, operand) for s, operand in ((left_scale, a), (right_scale, b)))
    kinds = [operand.format.two_d for operand in (a, b)] if _has_uneven_tiles(a.format, b.format, k) else []
    factors = a.format.scaling == "nvfp4"
    dtype = torch.float32 if factors else out_dtype
    product = native_product(left, right, left_scale, right_scale, kinds, dtype)
    if not factors:
        return product
    return epilogue(product, _factor(a), _factor(b), out_dtype)


def _product_like(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, kinds: list[bool], out_dtype: torch.dtype
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=out_dtype)


@operator(
    "native_product(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, bool[] kinds, ScalarType "
    "out_dtype) -> Tensor",
    fake=_product_like,
    devices=("CUDA",),
)
def native_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, kinds: list[bool], out_dtype: torch.dtype
) -> Tensor:
    """Return codes left [m, k] times codes right [n, k] transposed, [m, n], with their decode scales.

    kinds: for block FP8 in uneven tiles, whether each operand has tiles of 128x128; otherwise [].
    """
    if kinds:
        left_kind, right_kind = (SCALING_TYPES[kind] for kind in kinds)
        return F.scaled_mm(left, right.t(), left_scale, left_kind, right_scale, right_kind, output_dtype=out_dtype)
    left_scale, right_scale = map(_aligned, (left_scale, right_scale))
    if right_scale.dim() == 2:
        right_scale = right_scale.t()
    return scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=out_dtype)


def _aligned(scale: Tensor) -> Tensor:
    """Return a scale at an address that cuBLAS takes. A view into many experts' scales may begin elsewhere."""
    return scale.clone() if scale.data_ptr() % ALIGNMENT else scale


def multiply(a: Operand | ExactOperand, b: Operand | ExactOperand, mode: str, out_dtype: torch.dtype) -> Tensor:
    """Return a [m, k] times b [n, k] transposed, [m, n], in the recipe's mode: mm_t_native() for native, else
    mm_t()."""
    if mode != "native":
        return mm_t(a, b, out_dtype=out_dtype)
    (m, k), (n, _) = a.shape, b.shape
    if m * n * k == 0:  # an expert without tokens
        return torch.zeros(m, n, dtype=out_dtype, device=next(iter(a.buffers.values())).device)
    return mm_t_native(a, b, out_dtype=out_dtype)


def _operand(operand: Operand) -> tuple[Tensor, Tensor]:
    """Return codes and decode scales in the form that torch._scaled_mm takes for a row-major operand."""
    return _ARRANGED[operand.format.scaling](operand)


def _float8(operand: Operand) -> Tensor:
    return operand.buffers["q"].view(FLOAT8[operand.format.element_name])


def _per_tensor(operand: Operand) -> tuple[Tensor, Tensor]:
    return _float8(operand), operand.buffers["s"].view(())


def _per_row(operand: Operand) -> tuple[Tensor, Tensor]:
    return _float8(operand), operand.buffers["s"]


def _of_rows(scale: Tensor, operand: Operand) -> Tensor:
    """Return float32 [rows, 1]: a scale of each row. The scale of a tensor is repeated, as torchao does."""
    return scale if scale.dim() == 2 else scale.expand(operand.shape[0], 1).contiguous()


def _block(operand: Operand) -> tuple[Tensor, Tensor]:
    scales = operand.buffers["s"]
    if not operand.format.two_d:
        return _float8(operand), scales.t().contiguous().t()  # column-major
    missing = -scales.shape[1] % TILES
    return _float8(operand), F.pad(scales, (0, missing)).t() if missing else scales


def _mx(operand: Operand) -> tuple[Tensor, Tensor]:
    return _float8(operand), swizzle(_row_scales(operand)).view(torch.float8_e8m0fnu)


def _nvfp4(operand: Operand) -> tuple[Tensor, Tensor]:
    return operand.buffers["q"].view(torch.float4_e2m1fn_x2), swizzle(_row_scales(operand)).view(torch.float8_e4m3fn)


def _row_scales(operand: Operand) -> Tensor:
    """Return uint8 [rows, blocks]: scales, repeated for tiles of several rows."""
    height = operand.format.tile[0]
    return operand.buffers["s"].repeat_interleave(height, dim=0)[: operand.shape[0]]


def _factor(operand: Operand) -> ExactOperand:
    """Return the epilogue factor and divisor of NVFP4, without a matrix."""
    none = operand.buffers["g"].new_empty(0)
    return ExactOperand(none, operand.buffers["g"], operand.format.divisor)


_ARRANGED: dict[str, Callable[[Operand], tuple[Tensor, Tensor]]] = {
    "tensor": _per_tensor,
    "row": _per_row,
    "block": _block,
    "mx": _mx,
    "nvfp4": _nvfp4,
}
"""Format.scaling -> a function that returns codes and decode scales."""


def swizzle(scales: Tensor) -> Tensor:
    """Return block scales in cuBLAS's layout: uint8 [rows, blocks] -> uint8 [pad128(rows) * pad4(blocks)].

    Input has one scale per block along the contracted axis. The output consists of tiles of 128 rows x 4 blocks, one
    row of tiles after the other. Entry (i, j) lies at
        ((i div 128) * T + j div 4) * 512 + (i mod 32) * 16 + ((i mod 128) div 32) * 4 + j mod 4
    with T tiles per row. Padding is 0 (cuBLAS, "1D block scaling factors layout"; TransformerEngine
    common/cast/mxfp8/swizzle.cuh:30).
    """
    rows, blocks = scales.shape
    down, across = -(-rows // 128), -(-blocks // 4)
    padded = torch.nn.functional.pad(scales, (0, across * 4 - blocks, 0, down * 128 - rows))
    return padded.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(-1)
