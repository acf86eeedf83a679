"""Error statistics of a matrix that comes in chunks of rows and is never in memory as a whole.

Every chunk but the last has a multiple of 128 rows, so that no block of a format spans two chunks in either direction.
For formats with an amax of the whole, or of its columns, a first pass finds it. Every chunk is then quantized with it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hqsweep.formats import Format, RngKey
from hqsweep.ops.quantize.amax import Search, find_amax
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.quantize.request import Target
from hqsweep.ops.stats import Sums

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
    grids = _global_amaxes(chunks, formats)
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
    chunks: Callable[[], Iterable[Tensor]], formats: Mapping[str, Format]
) -> dict[str, dict[str, Tensor]]:
    """Return direction -> {"g": ...} for the directions whose format has amaxes that several chunks share."""
    shared = {
        d: format for d, format in formats.items() if format.amax_name and not (format.row_scaled and d == "rowwise")
    }
    amaxes: dict[str, Tensor] = {}
    for x in chunks() if shared else ():
        for d, format in shared.items():
            amaxes.setdefault(d, torch.zeros(x.shape[1] if format.row_scaled else 1, 1))
        find_amax(x, *(Search(format, amaxes.get(d)) for d, format in formats.items()))
    return {direction: {shared[direction].amax_name: amax} for direction, amax in amaxes.items()}
