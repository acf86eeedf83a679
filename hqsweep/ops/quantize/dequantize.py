"""Decode operands: to their values, or to the exact matrices that gemm=exact multiplies."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format
from hqsweep.ops.library import has_kernels
from hqsweep.ops.members.layout import GroupLayout, Layout
from hqsweep.ops.members.packed import PackedExact, held_exact, member_buffers, pack
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.kernels import DTYPES, KernelSpec, spec_named
from hqsweep.ops.quantize.request import Backend, check_backend


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


def dequantize_members(buffers: Buffers, format: Format, layout: GroupLayout, dtype: torch.dtype) -> Tensor:
    """Packed rowwise buffers of a group -> the values of all members [rows, width] in dtype, each as dequantize() has
    it. Nothing waits for splits where a kernel decodes; rows that are nobody's are left open then."""
    spec, rows, first = spec_named(format.text), layout.splits.rows, next(iter(buffers.values()))
    if spec.compiled is None or not has_kernels(first.device.type):
        members = zip(member_buffers(buffers, format, layout), layout.shapes, strict=True)
        values = torch.cat([dequantize(own, format, shape, dtype) for own, shape in members])
        return F.pad(values, (0, 0, 0, rows - len(values)))
    tensors, offsets = [buffers[name] for name in spec.names], layout.splits.offsets(first.device)
    values = operators.dequantize(tensors, spec.text, rows, layout.width, False, dtype, offsets)
    return values.view(rows, layout.width)


def exact_operand_of_parts(parts: Sequence[Buffers], format: Format, shape: tuple[int, int]) -> ExactOperand:
    """exact_operand_of() an operand whose columns are those of the parts, one after the other: the buffers of operands
    [rows, cols] of one shape, whose blocks end where they end; entries that cover a row are alike in all."""
    whole = ExactParts(len(parts), format, shape)
    for number, buffers in enumerate(parts):
        whole.decode(number, buffers)
    return whole.operand()


class ExactParts:
    """exact_operand_of_parts() of so many parts that are decoded one by one, in any order."""

    def __init__(self, count: int, format: Format, shape: tuple[int, int]) -> None:
        self.count, self.format, self.shape = count, format, shape
        self.exact: dict[int, ExactOperand] = {}
        """The parts that are decoded: views of the whole, where a kernel decodes."""
        self._matrix: Tensor | None = None

    def decode(self, number: int, buffers: Buffers) -> None:
        """Decode a part, if it is not."""
        if number in self.exact:
            return
        spec = spec_named(self.format.text)
        tensors = _tensors(buffers, spec, self.shape)
        if not tensors[0].is_cuda or not _by_kernel(tensors, spec, "auto", spec.gpu_exact_dtype):
            self.exact[number] = exact_operand_of(buffers, self.format, self.shape)
            return
        if self._matrix is None:
            rows, cols = self.shape
            self._matrix = tensors[0].new_empty(rows, cols * self.count, dtype=spec.gpu_exact_dtype)
        columns = self._matrix.chunk(self.count, dim=1)[number]
        operators.decode_into(columns, tensors, spec.text)
        factor = buffers[spec.amax_name] if spec.amax_name else None
        self.exact[number] = ExactOperand(columns, factor, spec.divisor)

    def operand(self) -> ExactOperand:
        """The whole, when all parts are decoded."""
        parts = [self.exact[number] for number in range(self.count)]
        whole = torch.cat([part.matrix for part in parts], dim=1) if self._matrix is None else self._matrix
        return replace(parts[0], matrix=whole)


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
