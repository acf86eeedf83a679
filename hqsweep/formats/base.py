"""Format: how a matrix becomes codes and scales along its last axis, as one frozen value; and parse, from its text.

A format has a single orientation. The columnwise representation of X is the rowwise representation of X.T, so this
module knows no directions. A format's layout says, per buffer, how many rows and columns of the matrix share an entry.
Shapes, allocation, slicing, gathering and bits per element follow from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats.random import RngKey
from hqsweep.formats.spec import NAMES, Family, fields_of, options
from hqsweep.memo import cached_property

Buffers = Mapping[str, Tensor]
WHOLE = 0
"""Divisor of a buffer with one entry for the whole axis."""
FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Buffer:
    """One buffer of a layout: an entry covers `rows` x `cols` elements of the matrix; WHOLE covers the axis."""

    rows: int
    cols: int
    dtype: torch.dtype

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the buffer's shape for a matrix of that shape. The last entry of an axis may be partly filled."""
        return _entries(rows, self.rows), _entries(cols, self.cols)


@dataclass(frozen=True)
class ExactOperand:
    """The matrix that a GEMM multiplies, and its epilogue's factor: value = matrix * factor / divisor.

    matrix [rows, cols] is bfloat16. It equals code * block scale without rounding where the format's docstring says so.
    It is float32 for formats that do not fit in bfloat16. factor is None, float32 [1, 1], or float32 [rows, 1]. The
    divisor is separate because TransformerEngine computes NVFP4's alpha as
        fl(fl(A_a * A_b) * fl(1 / (36 * max_a * max_b)))
    """

    matrix: Tensor
    factor: Tensor | None = None
    divisor: float = 1.0


class Format:
    """Interface of all formats. Subclasses are frozen dataclasses; equal fields mean equal formats."""

    name: str
    """First part of the format's string, such as "mxfp8"."""
    family: ClassVar[Family]
    """The names and options by which texts name the class."""

    high_precision: ClassVar[bool] = False
    """Whether the matrix is stored as values, without codes and scales."""
    scaling: ClassVar[str | None] = None
    """How a product scales the codes, as "tensor", "row", "block", "mx" or "nvfp4"; None in high precision."""
    amax_name: ClassVar[str | None] = None
    """The grid entry that is an amax of the whole matrix, or of a row: the only one that kernels take."""
    delayed: ClassVar[bool] = False
    """Whether that amax comes from earlier steps and must be given."""
    element_name: str
    """Type of one element: a name in ELEMENTS, or a high-precision dtype."""
    tile: tuple[int, int] = (1, 1)
    """Rows and columns of the matrix that share a scale; WHOLE covers the axis."""
    two_d = False
    """Whether a tile has several rows, so that the scales of X.T are the transposed scales of X."""
    rht = 0
    """The size of a random Hadamard transform along the contracted axis that comes first; 0: none. One text for both
    directions sets it for the columnwise operand."""
    rht_signed = True
    """Whether that transform has signs."""
    rht_drawn = False
    """Whether these signs are drawn by the key, so that grid and basis need a key, too."""
    row_scaled = False
    """Whether each row of the operand has its own amax."""
    rowwise_only = False
    """Whether it is for rowwise operands only."""
    four_over_six = False
    """Whether each block chooses between two scales."""
    stochastic = False
    """Whether rounding draws random bits, so that encode needs a key."""
    fits_bf16: bool = True
    """Whether the matrix of operand() fits in bfloat16."""
    divisor: float = 1.0
    """The divisor of operand()."""

    @property
    def rowwise_form(self) -> "Format":
        """The format without the options that one text for both directions sets columnwise (rht, eden)."""
        return self

    @property
    def columnwise_form(self) -> "Format":
        """The format without options of rowwise operands (row_scaled)."""
        return self

    @property
    def kernel_fields(self) -> dict[str, object] | None:
        """Keyword arguments of the compiled extension's Spec besides the tile; None for a format without a kernel."""
        return None

    def exact_dtype(self, on_gpu: bool) -> torch.dtype:
        """Return the dtype of the matrix that gemm=exact multiplies: float32 on a CPU; on a GPU bfloat16 if it fits."""
        return torch.bfloat16 if on_gpu and self.fits_bf16 else torch.float32

    def __str__(self) -> str:
        """Return the canonical text: the name, then options in the family's order. parse() reads it back."""
        default = {f.name: f.default for f in fields(self)}
        words = [self.name]
        for option, values in self.family.options.items():
            if all(getattr(self, f) == v != default[f] for f, v in values.items()):
                words.append(option)
        numbers = {option: f for option, (f, _) in self.family.numbered.items() if getattr(self, f) != default[f]}
        words += [f"{option}{getattr(self, f)!r}" for option, f in numbers.items()]
        return "+".join(words)

    @cached_property
    def text(self) -> str:
        """str(self), made once."""
        return str(self)

    @cached_property
    def layout(self) -> dict[str, Buffer]:
        """Buffer name -> Buffer, in the order in which buffers are saved and sent."""
        raise NotImplementedError

    @property
    def element_bits(self) -> int:
        """Bits of one code, without scales."""
        raise NotImplementedError

    @property
    def keeps_nan(self) -> bool:
        """Whether NaN is encoded as NaN. Elements of 4 and 6 bits have no NaN and take their largest number."""
        return self.high_precision or self.element_bits == 8

    @property
    def keeps_inf(self) -> bool:
        """Whether inf decodes to inf: with scales up to 2^127, or with an amax of inf as a factor.

        Float32 scales are 1 then, so inf decodes to the element's largest number.
        """
        return self.scaling in (None, "mx", "nvfp4")

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[int, int]]:
        """Return the shape of each buffer for a matrix [rows, cols]. UserError if the format cannot hold that shape."""
        self.check_shape(rows, cols)
        return {name: buffer.shape(rows, cols) for name, buffer in self.layout.items()}

    def bits_per_element(self, rows: int, cols: int) -> float:
        """Return the bits per element of a matrix of that shape: closely packed codes, and all scales."""
        entries = {name: math.prod(buffer.shape(rows, cols)) for name, buffer in self.layout.items()}
        scales = sum(n * self.layout[name].dtype.itemsize * 8 for name, n in entries.items() if name != "q")
        return self.element_bits + scales / (rows * cols)

    def empty(self, rows: int, cols: int, device: torch.device | str) -> dict[str, Tensor]:
        """Return uninitialised buffers for a matrix [rows, cols]."""
        shapes = self.shapes(rows, cols)
        return {n: torch.empty(shapes[n], dtype=b.dtype, device=device) for n, b in self.layout.items()}

    @property
    def column_multiple(self) -> int:
        """The number of columns must be a multiple of this; 1 for formats with partial blocks."""
        return 1

    def check_shape(self, rows: int, cols: int) -> None:
        """Raise UserError if blocks do not fit the last axis."""
        if cols % self.column_multiple:
            raise UserError(
                f"{self}: the contracted axis has {cols} elements; it takes a multiple of {self.column_multiple}"
            )

    def grid(self, x: Tensor, key: RngKey | None = None) -> dict[str, Tensor]:
        """Return all amaxes that encode needs, float32, with the names and shapes of the buffers they become. NaN is
        ignored.

        Ranks that hold parts of one matrix all-reduce them with MAX before encode. key: required by rht_drawn.
        """
        return {}

    def encode(self, x: Tensor, grid: Buffers | None = None, key: RngKey | None = None) -> dict[str, Tensor]:
        """Return the buffers of x, bf16, fp16 or fp32 [rows, cols].

        grid: defaults to grid(x, key). key: required by +sr and +eden.
        """
        raise NotImplementedError

    def decode(self, buffers: Buffers, shape: tuple[int, int]) -> Tensor:
        """Return float32 [rows, cols], computed in TransformerEngine's order of operations."""
        raise NotImplementedError

    def operand(self, buffers: Buffers, shape: tuple[int, int]) -> ExactOperand:
        """Return the ExactOperand that an emulated GEMM multiplies."""
        raise NotImplementedError

    def basis(self, x: Tensor, key: RngKey | None = None) -> Tensor:
        """Return the float32 [rows, cols] that decode(encode(x)) approximates: x, or its transform. key: required by
        rht_drawn."""
        return x.float()

    def scales(self, buffers: Buffers) -> Tensor | None:
        """Return the float32 decode scale of every block, without the global factor; None for formats without
        scales."""
        return None

    def value_scales(self, buffers: Buffers) -> Tensor | None:
        """Return the float32 scale from codes to values of every block, global factor included; None without scales."""
        return self.scales(buffers)

    def codes(self, buffers: Buffers) -> Tensor | None:
        """Return uint8 [rows, cols], one code per entry; None for Identity."""
        return None


_CLASSES: dict[str, type[Format]] = {}
"""Name -> its class, filled by the first parse(), because the modules of classes import this one. It is a global dict
so that torch.compile traces parse()."""


def parse(text: str) -> Format:
    """Return the Format of a text, which str() gives back. UserError as for spec.fields_of(), and for options that
    exclude each other."""
    name, fields = fields_of(text)
    if not _CLASSES:
        modules = {family: import_module(f"hqsweep.formats.{family.module}") for family in NAMES.values()}
        _CLASSES.update((known, getattr(modules[family], family.cls)) for known, family in NAMES.items())
    format = _CLASSES[name](**fields)
    _ = format.text  # computed now: torch.compile cannot trace the lock in Python 3.11's cached_property
    return format


@cache
def spellings(name: str) -> tuple[str, ...]:
    """Return the canonical texts of all combinations of a name's options, those with few options first.

    Options that a number follows are left out.
    """
    words = options(name)
    chosen = [combination for count in range(len(words) + 1) for combination in combinations(words, count)]
    return tuple(text for text in ("+".join((name, *combination)) for combination in chosen) if _canonical(text))


def bases() -> tuple[str, ...]:
    """Return the first name of every scaling, high precision included."""
    first: dict[str | None, str] = {}
    for name, family in NAMES.items():
        first.setdefault(family.scaling, name)
    return tuple(first.values())


def _canonical(text: str) -> bool:
    """Return whether parse takes the text and str gives it back."""
    try:
        return str(parse(text)) == text
    except UserError:  # options that exclude each other
        return False


def tile_amax(x: Tensor, rows: int, cols: int) -> Tensor:
    """Return max |x| over tiles of rows x cols (WHOLE = the axis), float32 [tiles, tiles]. NaN, and no input, count as
    0."""
    height, width = x.shape
    a = torch.nan_to_num(x.float().abs(), nan=0.0, posinf=torch.inf)
    tile_rows, tile_cols = rows or max(height, 1), cols or max(width, 1)
    tiles_down, tiles_across = _entries(height, rows), _entries(width, cols)
    pad = (0, tiles_across * tile_cols - width, 0, tiles_down * tile_rows - height)
    a = torch.nn.functional.pad(a, pad)
    return a.reshape(tiles_down, tile_rows, tiles_across, tile_cols).amax(dim=(1, 3))


def _entries(size: int, divisor: int) -> int:
    return 1 if divisor == WHOLE else -(-size // divisor)


def expand_tiles(tiles: Tensor, shape: tuple[int, int], rows: int, cols: int) -> Tensor:
    """Return one entry per tile, repeated over a matrix of `shape`. Axes with one entry stay broadcastable views."""
    if tiles.shape[0] > 1 and rows > 1:
        tiles = tiles.repeat_interleave(rows, dim=0)[: shape[0]]
    if tiles.shape[1] > 1 and cols > 1:
        tiles = tiles.repeat_interleave(cols, dim=1)[:, : shape[1]]
    return tiles


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """Return fl(numerator / denominator), correctly rounded: torch computes scalar / tensor as reciprocal times
    scalar."""
    return torch.full_like(denominator, numerator) / denominator


def fp8_scale(amax: Tensor, *, fp8_max: float, epsilon: float, pow2: bool, inf_value: float) -> Tensor:
    """Return S(amax): fl(fp8_max / max(amax, epsilon)), truncated to a power of two with pow2; 1 for an amax of 0 or
    inf.

    A quotient that overflows becomes inf_value before the truncation. Input and output are float32 of one shape.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = divide(fp8_max, amax)
    scale = torch.where(torch.isinf(scale), inf_value, scale)
    if pow2:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)
