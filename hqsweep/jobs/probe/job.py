"""Error statistics of every matrix of a file in many formats: which tensors can take which format?

This is no job of a sweep: nothing is trained, and the file may come from anywhere. Rows have the columns of
stats.jsonl, the shape, the bits of the format, and a note where a format cannot hold the matrix.

Matrices are read from safetensors files in chunks of rows, and are never in memory as a whole. Every chunk but the last
has a multiple of 128 rows, so that no block of a format spans two chunks in either direction. For formats with a global
amax, a first pass finds it. Every chunk is then quantized with it.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hqsweep.config.jobs import ERRORS
from hqsweep.config.recipe_files import FORMAT, recipe_file
from hqsweep.errors import UserError, nearest
from hqsweep.formats import Format, RngKey
from hqsweep.formats.spec import NAMES
from hqsweep.ops.quantize.amax import Search, find_amax
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.stats import Sums, finite_or_none
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.argument import recipe_of
from hqsweep.recipe.listing import slots

DTYPES = {"F64": torch.float32, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""dtype in a file -> the dtype in which its values are quantized. Other dtypes are not read."""
CHUNK_ELEMENTS = 2**24
"""The most elements in memory at a time, unless 128 rows have more."""
LEAST = 16
"""The least rows and columns of a tensor that counts as an operand of a GEMM."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A tensor [..., rows, cols] of a file. Its leading axes are folded into rows, as a linear folds them."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype as safetensors names it, such as BF16."""

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    def chunks(self) -> Iterator[Tensor]:
        """[rows, cols] parts from top to bottom. Each has a multiple of 128 rows, except the last."""
        inner = math.prod(self.shape[1:-1])
        unit = CHUNK_ROWS // math.gcd(CHUNK_ROWS, inner)
        step = max(1, CHUNK_ELEMENTS // (inner * self.cols * unit)) * unit
        with safe_open(self.file, "pt") as opened:
            part = opened.get_slice(self.name)
            for start in range(0, self.shape[0], step):
                yield part[start : start + step].reshape(-1, self.cols).to(DTYPES[self.dtype])


def find_matrices(path: Path) -> tuple[list[Matrix], list[tuple[str, str]]]:
    """(matrices, others) of a safetensors file, or of all in a folder. others: (name, why not) of tensors that are no
    matrices.

    Raises:
        UserError: nothing there, no safetensors file, a tensor in two of them, or no matrix.
    """
    matrices: dict[str, Matrix] = {}
    others: list[tuple[str, str]] = []
    for file in _files(path):
        try:
            with safe_open(file, "pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no mapping
                headers = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"'{file}' cannot be read as a safetensors file: {error}; give one, or a folder") from None
        for name, (shape, dtype) in headers.items():
            if name in matrices:
                raise UserError(f"tensor '{name}' is in '{matrices[name].file}' and in '{file}'; give one of the files")
            if why := _unreadable(shape, dtype):
                others.append((name, why))
            else:
                matrices[name] = Matrix(file=file, name=name, shape=shape, dtype=dtype)
    if not matrices:
        seen = "; ".join(f"{name}: {why}" for name, why in others[:3]) or "no tensors"
        raise UserError(f"'{path}' has no matrices of floating-point numbers ({seen})")
    return sorted(matrices.values(), key=_natural), others


def _natural(matrix: Matrix) -> list[str | int]:
    """A key that sorts layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", matrix.name)]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"'{path}' does not exist{nearest(path.name, names)}; give a safetensors file, or a folder")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"'{path}' has no .safetensors file; give a folder that has, or a file")
    return files


def _unreadable(shape: tuple[int, ...], dtype: str) -> str | None:
    """Return why a tensor cannot be an operand; None if it can."""
    if dtype not in DTYPES:
        return f"dtype {dtype}"
    if len(shape) < 2:
        return f"{len(shape)} axes"
    if min(math.prod(shape[:-1]), shape[-1]) < LEAST:
        return f"shape {list(shape)}, fewer than {LEAST} rows or columns"
    return None


CHUNK_ROWS = 128
DIRECTIONS = ("rowwise", "columnwise")


def stream_statistics(
    chunks: Callable[[], Iterable[Tensor]], rowwise: Format, columnwise: Format, key: RngKey | None = None
) -> dict[str, dict[str, float]]:
    """Return {"rowwise": ..., "columnwise": ...}: the statistics (ops.stats) that the whole matrix would have.

    chunks() restarts the matrix: each call yields its parts [rows, cols] from top to bottom. With +sr, every chunk
    draws random bits from a stream of its own.
    """
    formats = {"rowwise": rowwise, "columnwise": columnwise}
    grids = _global_amaxes(chunks, formats, key)
    sums: dict[str, Sums] = {}
    for index, x in enumerate(chunks()):
        keys = {d: key and replace(key, slot=f"{key.slot}/{d}/{index}") for d in DIRECTIONS}
        targets = (Target(formats[d], key=keys[d], grid=grids.get(d)) for d in DIRECTIONS)
        quantized = quantize(x, *targets, statistics=True)
        for direction in DIRECTIONS:
            part = getattr(quantized, f"{direction}_statistics").read()
            before = sums.get(direction)
            sums[direction] = before.joined(part, below=direction == "rowwise") if before else part
    return {direction: part.row() for direction, part in sums.items()}


def _global_amaxes(
    chunks: Callable[[], Iterable[Tensor]], formats: Mapping[str, Format], key: RngKey | None
) -> dict[str, dict[str, Tensor]]:
    """Return direction -> {"g": ...} for the directions whose format has amaxes that several chunks share."""
    shared = {
        d: format for d, format in formats.items() if format.amax_name and not (format.row_scaled and d == "rowwise")
    }
    amaxes: dict[str, Tensor] = {}
    for x in chunks() if shared else ():
        for d, format in shared.items():
            amaxes.setdefault(d, torch.zeros(x.shape[1] if format.row_scaled else 1, 1))
        find_amax(x, *(Search(format, amaxes.get(d), key=key) for d, format in formats.items()))
    return {direction: {shared[direction].amax_name: amax} for direction, amax in amaxes.items()}


Row = dict[str, Any]
SAMPLE = (256, 1024)
"""Rows and columns of the matrix that is timed to predict how long a probe takes."""


def parse_quantizers(texts: Sequence[str]) -> dict[str, HybridQuantizer]:
    """The quantizers of texts, each once: a format for both directions ("mxfp8", "format:mxfp8"), or one for each
    ("nvfp4|mxfp8"). A name that a format and a recipe share means the format.

    Raises:
        UserError: an unknown format, the name of a recipe, or a format whose error depends on more than the matrix.
    """
    quantizers = {}
    for text in filter(None, (text.strip() for text in texts)):
        if text not in NAMES and recipe_file(text):
            raise UserError(f"--formats: '{text}' is a recipe; give the formats of its linears, {_formats_of(text)}")
        quantizer = HybridQuantizer.parse(text.removeprefix(FORMAT))
        if quantizer.delayed:
            raise UserError(f"--formats: '{text}' takes its scale from earlier steps of a training; give fp8_current")
        if quantizer.columnwise_source != "original":
            raise UserError(f"--formats: '{text}': both directions are measured from the file; leave out the '@' part")
        quantizers[str(quantizer)] = quantizer
    if not quantizers:
        raise UserError("--formats: nothing given; give formats such as mxfp8,nvfp4")
    return quantizers


def _formats_of(recipe: str) -> str:
    """The quantizers of a recipe for linears and experts, as `--formats` takes them."""
    listed = [slot for slot in slots(recipe_of(recipe)) if slot.part in ("linear", "grouped_linear") and not slot.stage]
    return ",".join(dict.fromkeys(str(replace(slot.quantizer, columnwise_source="original")) for slot in listed))


def probe(matrix: Matrix, quantizers: dict[str, HybridQuantizer]) -> Iterator[Row]:
    """Two rows for each quantizer: the statistics of ops.stats, or None in all columns and a note."""
    finite = all(bool(x.isfinite().all()) for x in matrix.chunks())
    for text, quantizer in quantizers.items():
        statistics = {direction: dict.fromkeys(ERRORS) for direction in DIRECTIONS}
        note = _fault(matrix, quantizer) if finite else "has NaN or infinite values"
        if note is None:
            key = RngKey(seed=0, slot=matrix.name, step=0)
            both = stream_statistics(matrix.chunks, quantizer.rowwise, quantizer.columnwise, key)
            statistics = {direction: finite_or_none(row) for direction, row in both.items()}
        for direction, shape in zip(DIRECTIONS, ((matrix.rows, matrix.cols), (matrix.cols, matrix.rows)), strict=True):
            format = getattr(quantizer, direction)
            yield {
                "tensor": matrix.name, "file": matrix.file.name, "shape": list(matrix.shape), "dtype": matrix.dtype,
                "quantizer": text, "direction": direction, "format": str(format),
                "bits": format.bits_per_element(*shape), **statistics[direction], "note": note,
            }  # fmt: skip


def expected_seconds(matrices: Sequence[Matrix], quantizers: dict[str, HybridQuantizer]) -> float:
    """The seconds that probe() will take for all matrices, without reading. Each quantizer is timed on random
    numbers."""
    sample, seconds = torch.randn(SAMPLE), 0.0
    for quantizer in quantizers.values():
        for _ in range(2):  # the first call fills caches
            start = time.perf_counter()
            stream_statistics(
                lambda: [sample], quantizer.rowwise, quantizer.columnwise, RngKey(seed=0, slot="", step=0)
            )
            last = time.perf_counter() - start
        seconds += last
    return seconds * sum(matrix.rows * matrix.cols for matrix in matrices) / math.prod(SAMPLE)


def _fault(matrix: Matrix, quantizer: HybridQuantizer) -> str | None:
    """Why the matrix does not fit the blocks of the formats; None where it does."""
    try:
        quantizer.rowwise.check_shape(matrix.rows, matrix.cols)
        quantizer.columnwise.check_shape(matrix.cols, matrix.rows)
    except UserError as error:
        return str(error)
    return None
