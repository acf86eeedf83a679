"""Random quantization cases: what is drawn, the tensor it means, and what the reference makes of it.

A Case holds plain values only, so its repr is the reproducer of a failure. Formats are drawn by hypothesis (see
test_quantize.py); `variants` derives many cases of one draw from a seed, as hypothesis costs more than a small case.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from cases import KERNELS, LOW

from hqsweep.formats import ExactOperand, Format, RngKey, eden, parse, spellings
from hqsweep.formats.base import expand_tiles
from hqsweep.formats.elements import ELEMENTS

NAMES = tuple(name for name in LOW if name in KERNELS)
"""Formats without options that a kernel quantizes without a history."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("row", "row", "column", "wide", "tall", "gaps", "unaligned", "3d")
OUTPUTS = ("codes", "exact")
FACTORS = (0.0, 0.25, 0.7, 1.0, 2.0, 1000.0, float("inf"))
"""Given amaxes are the true ones times one of these (0 * inf, a NaN, is not given)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    row: str | None
    column: str | None
    dequantized: bool
    outputs: tuple[str, str]
    given: tuple[float | None, float | None]
    dtype: str
    rows: int
    cols: int
    distribution: str
    layout: str
    seed: int

    def formats(self) -> tuple[Format | None, Format | None]:
        return tuple(text and cached_parse(text) for text in (self.row, self.column))

    def keys(self) -> tuple[RngKey, RngKey]:
        return tuple(RngKey(seed=self.seed, slot=slot, step=self.seed % 5 << 30) for slot in ("row", "column"))


cached_parse = functools.cache(parse)


def texts(name: str) -> list[str]:
    """Every combination of a format's options, and two epsilons where it takes one."""
    epsilons = [f"{name}+eps{e}" for e in ("1e-06", "16.0") if "eps" in parse(name).family.numbered]
    return sorted([*spellings(name), *epsilons])


# ---- data ----------------------------------------------------------------------------------------------------------


def normal(rng, shape, dtype):
    return rng.standard_normal(shape) * 2.0 ** int(rng.integers(-12, 12))


def binades(rng, shape, dtype):
    return rng.standard_normal(shape) * np.exp2(rng.integers(-20, 16, shape))


def rows_and_columns(rng, shape, dtype):
    """A magnitude for each row and each column, as gradients and outlier channels have."""
    return rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (shape[0], 1)) + rng.integers(-6, 6, shape[1]))


def heavy_tail(rng, shape, dtype):
    return rng.standard_cauchy(shape) ** 3


def constant(rng, shape, dtype):
    return np.full(shape, rng.standard_normal() * 2.0 ** int(rng.integers(-14, 15)))


def subnormals(rng, shape, dtype):
    info = torch.finfo(DTYPES[dtype])
    return rng.integers(-(1 << 8), 1 << 8, shape) * (info.tiny * 2.0 ** int(rng.integers(-8, -4)))


def zeros(rng, shape, dtype):
    mask = rng.random(shape) < (0.0, 0.02, 0.3)[int(rng.integers(3))]
    return np.where(mask, rng.standard_normal(shape), np.where(rng.random(shape) < 0.5, -0.0, 0.0))


def nonfinite(rng, shape, dtype):
    x = rng.standard_normal(shape)
    for value in (np.inf, -np.inf, np.nan):
        x[rng.random(shape) < (0.0, 0.01, 0.2)[int(rng.integers(3))]] = value
    return x


def ties(rng, shape, dtype):
    """Midpoints between neighbouring values of an element, and the values, under one power of two a row."""
    element = list(ELEMENTS.values())[int(rng.integers(5))]
    values = element.values()[: 1 << (element.bits - 1)]
    values = values[values.isfinite()].numpy().astype(np.float64)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    return rng.choice(points, shape) * rng.choice((-1.0, 1.0), shape) * np.exp2(rng.integers(-4, 3, (shape[0], 1)))


def powers(rng, shape, dtype):
    return np.exp2(rng.integers(-14, 16, shape)) * rng.choice((-1.0, 1.0), shape)


def scale_edges(rng, shape, dtype):
    """Block amaxes at and next to where a power-of-two scale changes: 2^k times 1, max or 2 - half ulp."""
    edges = np.array([1, 1.75, 1.5, 1.875, 2 - 1 / 4, 2 - 1 / 8, 2 - 1 / 16], np.float32)
    x = np.float32(rng.uniform(-0.99, 0.99, shape))
    peaks = rng.choice(edges, shape) * np.exp2(rng.integers(-3, 4, shape)).astype(np.float32)
    peaks = np.stack([np.nextafter(peaks, np.float32(0)), peaks, np.nextafter(peaks, np.float32(np.inf))])
    peaks = np.take_along_axis(peaks, rng.integers(0, 3, (1, *shape)), 0)[0]
    return np.where(rng.random(shape) < 0.05, peaks * rng.choice((-1.0, 1.0), shape), x)


def ends(rng, shape, dtype):
    """Near the largest and the smallest numbers of the dtype."""
    info = torch.finfo(DTYPES[dtype])
    return rng.uniform(-1, 1, shape) * rng.choice((info.max, info.tiny), size=(shape[0], 1))


def any_bits(rng, shape, dtype):
    bits = rng.integers(0, 1 << 32, shape, np.uint32)
    return bits.view(np.float32) if dtype != "fp16" else (bits >> 16).astype(np.uint16).view(np.float16)


DISTRIBUTIONS = {f.__name__: f for f in (normal, binades, rows_and_columns, heavy_tail, constant, subnormals, zeros,
                                         nonfinite, ties, powers, scale_edges, ends, any_bits)}  # fmt: skip


def tensor(case: Case, device: str = "cpu") -> torch.Tensor:
    """The input of a case: its values, in its layout."""
    rng, dtype, shape = np.random.default_rng(case.seed), DTYPES[case.dtype], (case.rows, case.cols)
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.asarray(DISTRIBUTIONS[case.distribution](rng, shape, case.dtype)).astype(np.float32)
    x = torch.from_numpy(values).to(device).to(dtype)
    match case.layout:
        case "row":
            return x
        case "3d":
            return x.view(case.rows // 3, 3, case.cols) if case.rows % 3 == 0 else x.view(1, *shape)
        case "column":
            return x.t().contiguous().t()
    step = {"wide": (1, 1), "tall": (2, 1), "gaps": (2, 3), "unaligned": (1, 1)}[case.layout]
    column = case.layout == "unaligned"
    storage = torch.full((case.rows * step[0], case.cols * step[1] + 5), torch.nan, dtype=dtype, device=device)
    view = storage[:: step[0], column : column + case.cols * step[1] : step[1]]
    return view.copy_(x)


# ---- expected results ----------------------------------------------------------------------------------------------


def reference(case: Case, x: torch.Tensor) -> list[tuple]:
    """Per direction (the result, the given amax): None, the buffers, or an ExactOperand in float32 (what rounds to the
    operand's dtype); and None, or a grid with the global amax."""
    x = x.reshape(case.rows, case.cols)
    row, column = case.formats()
    results, source = [(None, None)] * 2, x
    if row:
        buffers, grid = encode(row, x, case.given[0], case.keys()[0])
        results[0] = output(row, buffers, x.shape, case.outputs[0]), grid
        source = row.decode(buffers, tuple(x.shape)).to(x.dtype) if case.dequantized else x
    if column:
        buffers, grid = encode(column, source.t(), case.given[1], case.keys()[1])
        results[1] = output(column, buffers, source.t().shape, case.outputs[1]), grid
    return results


def encode(format: Format, x: torch.Tensor, factor: float | None, key: RngKey) -> tuple[dict, dict | None]:
    """Buffers, and the global amax if the case gives one: the true one times the factor."""
    grid, name, amax = format.grid(x, key), format.amax_name, None
    if factor is not None and name:
        amax = {name: (grid[name] * factor).nan_to_num(nan=0.0, posinf=torch.inf)}
    return format.encode(x, grid | (amax or {}), key), amax


def output(format: Format, buffers: dict, shape, kind: str):
    if kind == "codes":
        return buffers
    if format.high_precision:
        return format.operand(buffers, tuple(shape))
    matrix, name = format.element.decode(format.codes(buffers)), format.amax_name
    largest = {"e2m1": 6.0, "e1m2": 3.5}.get(format.element.name, 0.0)
    largest = eden.MAX if format.rht_drawn else largest
    if format.scaling not in ("tensor", "row", "int_row"):  # whose scales are factors
        matrix = matrix * expand_tiles(format.scales(buffers), tuple(shape), *format.tile)
    return ExactOperand(matrix, buffers.get(name), largest * format.scale_max if name == "g" else 1.0)


def differences(got, expected) -> list[str]:
    """Names of the tensors that differ in one direction, byte for byte; any two NaNs of an exact operand are equal."""
    if isinstance(expected, ExactOperand):
        if got.divisor != expected.divisor:
            return ["divisor"]
        got, expected = ({"matrix": o.matrix, "factor": o.factor} for o in (got, expected))
        expected["matrix"] = expected["matrix"].to(got["matrix"].dtype)
    if got is None or expected is None:
        return [] if got is expected else ["None"]
    if got.keys() != expected.keys():
        return [f"buffers {list(got)} instead of {list(expected)}"]
    return [name for name in expected if not same_bits(got[name], expected[name])]


def same_bits(got: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    got, expected = got.cpu(), expected.contiguous().cpu()
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if got.dtype == torch.uint8:
        return torch.equal(got, expected)
    integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
    same = got.contiguous().view(integer) == expected.view(integer)
    return bool((same | (got.isnan() & expected.isnan())).all())


# ---- drawing -------------------------------------------------------------------------------------------------------


def variants(drawn: dict, seed: int, count: int):
    """`count` cases with the drawn formats, dtype and distribution; the rest varies."""
    rng = np.random.default_rng(seed)
    row, column = (cached_parse(text) if text else None for text in (drawn["row"], drawn["column"]))
    multiples = (column.column_multiple if column else 1, row.column_multiple if row else 1)
    for _ in range(count):
        limits = (40, 180) if rng.random() < 0.5 else (180, 40)
        size = [int(rng.integers(0, 10 if rng.random() < 0.3 else n)) for n in limits]
        rows, cols = (-(-n // m) * m for n, m in zip(size, multiples, strict=True))
        yield Case(
            **drawn,
            outputs=tuple(OUTPUTS[int(i)] for i in rng.integers(0, 2, 2)),
            given=tuple(None if rng.random() < 0.6 else FACTORS[int(rng.integers(len(FACTORS)))] for _ in "rc"),
            rows=rows,
            cols=cols,
            layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))],
            seed=int(rng.integers(1 << 31)),
        )
