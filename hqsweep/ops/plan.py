"""What the compiled extension needs to know about a format, worked out once: its Spec, and the buffers it fills."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Format, parse
from hqsweep.memo import constant_result

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of elements, by the extension's numbers."""
TILE = 128
"""Side of the tiles of X over which statistics are summed."""
SUMS = 8
"""Sums per tile (csrc/quantize.h, TileSums)."""
SHAPES_KEPT = 4096
NO_KEY = [0, 0, 0]
"""Philox key words and step where nothing is random."""
Allocation = tuple[tuple[int, int], torch.dtype]


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which takes its time to find that there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


@cache
def extension():
    """The compiled module hqsweep._C, or None when it was not built."""
    try:
        from hqsweep import _C
    except ImportError:
        return None
    return _C


@cache
def _devices() -> tuple[str, ...]:
    if extension() is None:
        return ()
    return ("cpu", "cuda") if extension().build_info()["cuda"] else ("cpu",)


@constant_result
def has_kernels(device_type: str) -> bool:
    """Whether the extension was built, and for that type of device."""
    return device_type in _devices()


def spec_fields(format: Format) -> dict[str, object] | None:
    """Keyword arguments of _C.Spec for a format, or None for one without a kernel (Identity)."""
    fields = format.kernel_fields
    return fields and fields | {"tile_rows": format.tile[0], "tile_cols": format.tile[1]}


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """All about a format that its calls share.

    What torch.compile may trace calls its methods as Plan.method(plan, ...): a method of an object that a
    constant_result gives is nothing that it can guard.
    """

    format: Format
    text: str
    """The canonical text, by which operators name the format."""
    spec: object | None
    """The extension's Spec, or None without a kernel."""
    names: tuple[str, ...]
    """The format's buffers in the order of its layout, which is that of the operators."""
    buffers: tuple[tuple[str, int, int, torch.dtype], ...]
    """Name, rows and columns per entry, dtype (plain values, which graphs can be traced through)."""
    amax_name: str | None
    """The buffer of a grid that is a global amax: the only one that kernels take."""
    delayed: bool
    """Whether that amax must be given, because the format's comes from earlier steps."""
    multiple: int
    """What the length of the contracted axis must be a multiple of."""
    row_scaled: bool
    stochastic: bool
    divisor: float
    """Of the exact operand."""

    def exact_dtype(self, on_gpu: bool) -> torch.dtype:
        """dtype of the matrix that gemm=exact multiplies."""
        return torch.bfloat16 if on_gpu and self.format.fits_bf16 else torch.float32

    def allocations(
        self, rows: int, cols: int, exact: bool, given: bool, on_gpu: bool, statistics: bool
    ) -> list[Allocation]:
        """The operator's outputs for one operand: the format's buffers, or the exact matrix and its factor; then sums
        and row errors. A given global amax that is itself a buffer is not among them."""
        layout = self.format.layout
        kept = given and self.amax_name == "g"
        if exact:
            made = [((rows, cols), self.exact_dtype(on_gpu))]
            if self.amax_name and not kept:
                made.append((layout[self.amax_name].shape(rows, cols), torch.float32))
        else:
            made = [(b.shape(rows, cols), b.dtype) for name, b in layout.items() if not (kept and name == "g")]
        if statistics:
            down, across = -(-rows // TILE), -(-cols // TILE)
            made += [((down * across, SUMS), torch.float32), ((rows, across), torch.float32)]
        return made

    def check_amax(self, name: str, amax: Tensor | None, rows: int, x: Tensor, matrices: int = 1) -> None:
        """UserError unless `amax` holds what the kernels read through its address."""
        if amax is None:
            return
        count = rows if self.row_scaled else matrices
        if amax.numel() == count and amax.dtype is torch.float32 and amax.is_contiguous() and amax.device == x.device:
            return
        got = f"{amax.dtype} of shape {tuple(amax.shape)} on {amax.device}"
        got += "" if amax.is_contiguous() else ", not contiguous"
        raise UserError(f"{name} for {self.text} is {got}; it takes {count} contiguous float32 on {x.device}")


_PLANS: dict[Format, Plan] = {}


@constant_result
def plan_of(format: Format) -> Plan:
    """The plan of a format, made once."""
    found = _PLANS.get(format)
    if found is None:
        found = _PLANS[format] = _make(format)
    return found


def _make(format: Format) -> Plan:
    fields = spec_fields(format)
    return Plan(
        format=format,
        text=format.text,
        spec=extension().Spec(**fields) if fields and extension() else None,
        names=tuple(format.layout),
        buffers=tuple((name, b.rows, b.cols, b.dtype) for name, b in format.layout.items()),
        amax_name=format.amax_name,
        delayed=format.delayed,
        multiple=format.column_multiple,
        row_scaled=format.row_scaled,
        stochastic=format.stochastic,
        divisor=format.divisor,
    )


@cache
def plan(text: str) -> Plan:
    """The plan of a format's text, as operators know it."""
    return plan_of(parse(text))
