"""Decode operands: to their values, or to the exact matrices that gemm=exact multiplies."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format
from hqsweep.ops import operators
from hqsweep.ops.kernels import DTYPES, KernelSpec, spec_named
from hqsweep.ops.layout import GroupLayout, Layout
from hqsweep.ops.library import has_kernels
from hqsweep.ops.packed import PackedExact, held_exact, member_buffers, pack
from hqsweep.ops.request import Backend, check_backend


def dequantize(
    buffers: Buffers,
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Buffers of an operand -> its values [rows, cols] in TransformerEngine's order of operations, rounded to dtype
    (default float32). UserError for buffers of other shapes or types than the format's."""
    dtype, spec = dtype or torch.float32, spec_named(format.text)
    tensors = _tensors(buffers, spec, shape)
    if _by_kernel(tensors, spec, backend, dtype):
        return operators.dequantize(tensors, spec.text, *shape, False, dtype)
    return format.decode(buffers, shape).to(dtype)


def exact_operand_of(
    buffers: Buffers, format: Format, layout: tuple[int, int] | Layout, backend: Backend = "auto"
) -> ExactOperand:
    """Buffers of an operand [rows, cols] -> what gemm=exact multiplies, as quantize() to output "exact" gives it.

    With a layout, packed buffers -> those of all members, to the byte, which lie by rows. One call decodes all where
    there is a kernel and members have one width; nothing waits for splits then.
    """
    if isinstance(layout, Layout):
        return _exact_members(buffers, format, layout)
    spec = spec_named(format.text)
    tensors = _tensors(buffers, spec, layout)
    dtype = spec.gpu_exact_dtype if tensors[0].is_cuda else spec.cpu_exact_dtype
    if not _by_kernel(tensors, spec, backend, dtype):
        return format.operand(buffers, layout)
    matrix = operators.dequantize(tensors, spec.text, *layout, True, dtype)
    return ExactOperand(matrix, buffers[spec.amax_name] if spec.amax_name else None, spec.divisor)


def exact_operand_of_parts(parts: Sequence[Buffers], format: Format, shape: tuple[int, int]) -> ExactOperand:
    """exact_operand_of() an operand whose columns are those of the parts, one after the other: the buffers of operands
    [rows, cols] of one shape, whose blocks end where they end; entries that cover a row are alike in all."""
    (rows, cols), spec, first = shape, spec_named(format.text), parts[0]
    tensors = [_tensors(buffers, spec, shape) for buffers in parts]
    if not tensors[0][0].is_cuda or not _by_kernel(tensors[0], spec, "auto", spec.gpu_exact_dtype):
        exact = [exact_operand_of(buffers, format, shape) for buffers in parts]
        return replace(exact[0], matrix=torch.cat([each.matrix for each in exact], dim=1))
    matrix = tensors[0][0].new_empty(rows, cols * len(parts), dtype=spec.gpu_exact_dtype)
    for columns, own in zip(matrix.chunk(len(parts), dim=1), tensors, strict=True):
        operators.decode_into(columns, own, spec.text)
    return ExactOperand(matrix, first[spec.amax_name] if spec.amax_name else None, spec.divisor)


def _exact_members(buffers: Buffers, format: Format, layout: Layout) -> PackedExact:
    spec, first = spec_named(format.text), next(iter(buffers.values()))
    if format.high_precision:
        return held_exact(buffers["q"], format, layout)
    if spec.compiled is None or not has_kernels(first.device.type) or not isinstance(layout, GroupLayout):
        members = zip(member_buffers(buffers, format, layout), layout.shapes, strict=True)
        exact = [exact_operand_of(own, format, shape) for own, shape in members]
        return pack(exact, format, layout, by_rows=layout.columnwise)
    dtype = spec.gpu_exact_dtype if first.is_cuda else spec.cpu_exact_dtype
    matrix = operators.dequantize(
        [buffers[name] for name in spec.names], spec.text, layout.splits.rows, layout.width, True,
        dtype, layout.splits.offsets(first.device), layout.columnwise,
    )  # fmt: skip
    kwargs = {"layout": layout, "by_rows": layout.columnwise, "per_row": spec.row_scaled}
    return PackedExact(matrix, buffers.get(spec.amax_name), spec.divisor, **kwargs)


def _tensors(buffers: Buffers, spec: KernelSpec, shape: tuple[int, int]) -> list[Tensor]:
    """The buffers in layout order, contiguous, after a check against the layout."""
    rows, cols = shape
    tensors = []
    for name, down, across, dtype in spec.buffers:
        tensor, wanted = buffers.get(name), (-(-rows // down) if down else 1, -(-cols // across) if across else 1)
        if tensor is None or tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            got = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UserError(
                f"dequantize: buffer {name} of a {spec.text} operand {tuple(shape)} is {got}, not {dtype} {wanted}"
            )
        tensors.append(tensor)
    return [tensor.contiguous() for tensor in tensors] if spec.compiled else tensors


def _by_kernel(tensors: list[Tensor], spec: KernelSpec, backend: Backend, dtype: torch.dtype) -> bool:
    check_backend(backend)
    supported = spec.compiled is not None and has_kernels(tensors[0].device.type) and dtype in DTYPES
    if backend == "kernel" and not supported:
        raise UserError(f"no kernel decodes {spec.text} to {dtype} on {tensors[0].device}; use backend reference")
    return supported and backend != "reference"
