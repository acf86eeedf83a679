"""Error statistics of a matrix that is never in memory as a whole: it comes in chunks of rows.

Chunks are multiples of 128 rows but the last, so that no block of a format, in either direction, spans two of them.
Formats with one amax for the whole take a first pass that finds it, and every chunk is quantized under the amax of all.
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
    """{"rowwise": ..., "columnwise": ...}: rows of ops.stats, those of the matrix quantized at once.

    chunks() gives the matrix anew at each call, as [rows, cols] parts from top to bottom. Formats with +sr draw the
    random bits of every chunk from its own stream.
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
    """Direction -> {"g": ...}, for those whose format has an amax of the whole matrix."""
    names = {d: format.amax_name for d, format in formats.items() if format.amax_name and not format.row_scaled}
    amaxes = {direction: torch.zeros(1, 1) for direction in names}
    if amaxes:
        searches = [Search(format, amaxes.get(d)) for d, format in formats.items()]
        for x in chunks():
            find_amax(x, *searches)
    return {direction: {names[direction]: amax} for direction, amax in amaxes.items()}
