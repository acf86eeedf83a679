"""Decode operands to values, or to the exact matrices that gemm=exact multiplies."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, ExactOperand, Format
from hqsweep.memo import memo
from hqsweep.ops.layout import GroupLayout, Layout, PackedExact, held_exact, member_buffers, pack
from hqsweep.ops.library import check_offsets, described, empty, extension, has_kernels, integers, operator, where
from hqsweep.ops.quantize.kernels import DTYPES, KernelSpec, kernel_of, spec_named
from hqsweep.ops.quantize.operators import Matrices, packed_entries
from hqsweep.ops.quantize.request import Backend, check_backend


def dequantize(
    buffers: Buffers,
    format: Format,
    shape: tuple[int, int],
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the values [rows, cols] of an operand, decoded in TransformerEngine's order of operations, in dtype
    (float32).

    UserError for buffers whose shapes or types differ from the format's layout.
    """
    dtype, spec = dtype or torch.float32, spec_named(format.text)
    tensors = _tensors(buffers, spec, shape)
    if _by_kernel(tensors, spec, backend, dtype):
        return decode(tensors, spec.text, *shape, False, dtype)
    return format.decode(buffers, shape).to(dtype)


def exact_operand_of(
    buffers: Buffers, format: Format, layout: tuple[int, int] | Layout, backend: Backend = "auto"
) -> ExactOperand:
    """Return the ExactOperand of buffers, with the bytes that quantize() gives for output "exact".

    layout: the operand's [rows, cols], or the Layout of packed buffers. With a Layout the result is the PackedExact of
    all members, stored by rows. One kernel call decodes all members of one width and waits for no splits.
    """
    if isinstance(layout, Layout):
        return _exact_members(buffers, format, layout)
    spec = spec_named(format.text)
    tensors = _tensors(buffers, spec, layout)
    dtype = spec.gpu_exact_dtype if tensors[0].is_cuda else spec.cpu_exact_dtype
    if not _by_kernel(tensors, spec, backend, dtype):
        return format.operand(buffers, layout)
    matrix = decode(tensors, spec.text, *layout, True, dtype)
    return ExactOperand(matrix, buffers[spec.amax_name] if spec.amax_name else None, spec.divisor)


def dequantize_members(buffers: Buffers, format: Format, layout: GroupLayout, dtype: torch.dtype) -> Tensor:
    """Return the values [rows, width] of all members from their packed rowwise buffers, in dtype.

    Each member has the bytes of dequantize(). A kernel waits for no splits, and leaves trailing padding rows undefined.
    """
    spec, rows, first = spec_named(format.text), layout.splits.rows, next(iter(buffers.values()))
    if spec.compiled is None or not has_kernels(first.device.type):
        members = zip(member_buffers(buffers, format, layout), layout.shapes, strict=True)
        values = torch.cat([dequantize(own, format, shape, dtype) for own, shape in members])
        return F.pad(values, (0, 0, 0, rows - len(values)))
    tensors, offsets = [buffers[name] for name in spec.names], layout.splits.offsets(first.device)
    values = decode(tensors, spec.text, rows, layout.width, False, dtype, offsets)
    return values.view(rows, layout.width)


def exact_operand_of_parts(parts: Sequence[Buffers], format: Format, shape: tuple[int, int]) -> ExactOperand:
    """Return the ExactOperand of a matrix whose columns are split into parts.

    parts: buffers of operands [rows, cols] of one shape, from left to right. Blocks end where parts end. Entries that
    cover a whole row are equal in all parts.
    """
    whole = ExactParts(len(parts), format, shape)
    for number, buffers in enumerate(parts):
        whole.decode(number, buffers)
    return whole.operand()


class ExactParts:
    """Incremental exact_operand_of_parts(): `count` parts, decoded one by one in any order."""

    def __init__(self, count: int, format: Format, shape: tuple[int, int]) -> None:
        self.count, self.format, self.shape = count, format, shape
        self.exact: dict[int, ExactOperand] = {}
        """Part number -> decoded part: a view into the whole matrix if a kernel decodes."""
        self._matrix: Tensor | None = None

    def decode(self, number: int, buffers: Buffers) -> None:
        """Decode a part unless it is decoded already."""
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
        decode_into(columns, tensors, spec.text)
        factor = buffers[spec.amax_name] if spec.amax_name else None
        self.exact[number] = ExactOperand(columns, factor, spec.divisor)

    def operand(self) -> ExactOperand:
        """Return the whole operand. All parts must be decoded."""
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
    matrix = decode(
        [buffers[name] for name in spec.names], spec.text, layout.splits.rows, layout.width, True,
        dtype, layout.splits.offsets(first.device), layout.columnwise,
    )  # fmt: skip
    kwargs = {"layout": layout, "by_rows": layout.columnwise, "per_row": spec.row_scaled}
    return PackedExact(matrix, buffers.get(spec.amax_name), spec.divisor, **kwargs)


def _tensors(buffers: Buffers, spec: KernelSpec, shape: tuple[int, int]) -> list[Tensor]:
    """Return the buffers in layout order, contiguous. UserError if they do not fit the layout."""
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


def _decode_fake(buffers, format, rows, cols, exact, dtype, offsets=None, columnwise=False):
    return buffers[0].new_empty((rows, cols) if offsets is None else (rows * cols,), dtype=dtype)


@operator(
    "dequantize(Tensor[] buffers, str format, SymInt rows, SymInt cols, bool exact, ScalarType dtype, "
    "Tensor? offsets=None, bool columnwise=False) -> Tensor",
    fake=_decode_fake,
)
def decode(buffers, format, rows, cols, exact, dtype, offsets=None, columnwise=False):
    """Return the values of buffers, in layout order, in dtype. exact: codes times block scales.

    One operand [rows, cols] gives a matrix. Packed buffers of the members of X [rows, cols] give flat [rows * cols],
    stored by rows of X even if columnwise. The bytes equal a call per member.
    ValueError for offsets or packed buffers with wrong types, and for too few entries.
    """
    if not buffers:  # offsets alone also give a device
        raise ValueError("there are no buffers to decode")
    first, number = buffers[0], DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"dtype is {dtype}; values are decoded to float32, bfloat16 or float16")
    members = None if offsets is None else check_offsets(first, offsets)
    spec, least = _least_entries(format, rows, cols, columnwise, members)
    _check_buffers(spec, buffers, least)
    addresses = [tensor.data_ptr() for tensor in buffers] + [0] * (3 - len(buffers))
    run = extension().dequantize_cuda if first.is_cuda else extension().dequantize_cpu
    threads = where(first)[0]
    if offsets is None:
        out = empty(first, (rows, cols), (cols or 1, 1), dtype)
        run(spec.compiled, rows, cols, *addresses, exact, out.data_ptr(), number, threads, columnwise)
        return out
    if not first.is_cuda:
        _check_buffers(spec, buffers, _entries(spec, rows, cols, columnwise, offsets))
    out = empty(first, (rows * cols,), (1,), dtype)
    call = (spec.compiled, rows, cols, *addresses, exact, out.data_ptr(), number, threads)
    run(*call, columnwise, offsets.data_ptr(), members)
    return out


def decode_into(out: Tensor, buffers: list[Tensor], format: str) -> None:
    """Decode one operand exactly, on CUDA, into out [rows, cols], whose rows may lie apart.

    ValueError for an unfit out, and as decode() raises it.
    """
    (rows, cols), first = out.shape, buffers[0]
    spec, least = _least_entries(format, rows, cols, False, None)
    _check_buffers(spec, buffers, least)
    if out.dtype not in DTYPES or out.stride(1) != 1 or out.stride(0) < cols or out.device != first.device:
        raise ValueError(f"out is {described(out)}; it takes rows of floats without gaps on {first.device}")
    addresses = [tensor.data_ptr() for tensor in buffers] + [0] * (3 - len(buffers))
    call = (spec.compiled, rows, cols, *addresses, True, out.data_ptr(), DTYPES[out.dtype], *where(first))
    extension().dequantize_cuda(*call, pitch=out.stride(0))


def _check_buffers(spec: KernelSpec, buffers: list[Tensor], least: list[int]) -> None:
    """Raise ValueError for buffers that the kernels cannot read, or with fewer entries than `least`."""
    if len(buffers) != len(least):
        raise ValueError(f"{len(buffers)} buffers for {spec.text}; it has {len(least)}: {', '.join(spec.names)}")
    device = buffers[0].get_device()
    for (name, _, _, wanted), tensor, count in zip(spec.buffers, buffers, least, strict=True):
        readable = tensor.dtype is wanted and tensor.is_contiguous() and tensor.get_device() == device
        if not readable or tensor.numel() < count:
            takes = f"it takes {count} or more contiguous {wanted} on {buffers[0].device}"
            raise ValueError(f"buffer {name} is {described(tensor)}; {takes}")


@memo
def _least_entries(
    text: str, rows: int, cols: int, columnwise: bool, members: int | None
) -> tuple[KernelSpec, list[int]]:
    """Return the KernelSpec, and the fewest entries that each buffer needs for X [rows, cols].

    With members, the minimum is that of one member with all rows. ValueError for a negative size.
    """
    spec = kernel_of(text)
    if rows < 0 or cols < 0:
        raise ValueError(f"an operand cannot have the shape {(rows, cols)}")
    if members is None:
        shapes = spec.format.shapes(rows, cols)
        return spec, [math.prod(shapes[name]) for name in spec.names]
    if rows == 0 or cols == 0:
        return spec, [0] * len(spec.names)
    alone = Matrices(rows, cols, members, (rows, *(0,) * (members - 1)) if members else ())
    return spec, [packed_entries(alone, columnwise, down, across) for _, down, across, _ in spec.buffers]


def _entries(spec: KernelSpec, rows: int, cols: int, columnwise: bool, offsets: Tensor) -> list[int]:
    """Return the entries of each packed buffer up to the end of the last member. offsets: on the CPU.

    Wrong offsets are clamped, so that the result never exceeds the rows of X.
    """
    ends = [min(end, rows) for end in integers(offsets)]
    matrices = Matrices(rows, cols, len(ends) - 1, tuple(max(end - start, 0) for start, end in pairwise(ends)))
    return [packed_entries(matrices, columnwise, down, across) for _, down, across, _ in spec.buffers]
