"""Error statistics of a matrix that is never in memory as a whole: it comes in chunks of rows.

Chunks are multiples of 128 rows but the last, so that no block of a format, in either direction, spans two of them.
Formats with one amax for the whole take a first pass that finds it, and every chunk is quantized under the amax of all.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from hqsweep.formats import Format, RngKey
from hqsweep.ops.plan import plan_of
from hqsweep.ops.quantize import find_amax, quantize
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
    grids = _global_amaxes(chunks, rowwise, columnwise)
    sums: dict[str, Sums] = {}
    for index, x in enumerate(chunks()):
        keys = {f"{d}_key": key and replace(key, slot=f"{key.slot}/{d}/{index}") for d in DIRECTIONS}
        made = quantize(x, rowwise, columnwise, **grids, **keys, statistics=True)
        for direction in DIRECTIONS:
            part = getattr(made, f"{direction}_statistics").read()
            before = sums.get(direction)
            sums[direction] = before.joined(part, below=direction == "rowwise") if before else part
    return {direction: part.row() for direction, part in sums.items()}


def _global_amaxes(
    chunks: Callable[[], Iterable[Tensor]], rowwise: Format, columnwise: Format
) -> dict[str, dict[str, Tensor]]:
    """{"rowwise_grid": {"g": ...}, ...} for the directions whose format has an amax of the whole matrix."""
    names = {
        direction: plan_of(format).amax_name
        for direction, format in zip(DIRECTIONS, (rowwise, columnwise), strict=True)
        if not format.row_scaled
    }
    amaxes = {direction: torch.zeros(1, 1) for direction, name in names.items() if name}
    if amaxes:
        outs = {f"out_{direction}": amax for direction, amax in amaxes.items()}
        for x in chunks():
            find_amax(x, rowwise, columnwise, **outs)
    return {f"{direction}_grid": {names[direction]: amax} for direction, amax in amaxes.items()}
