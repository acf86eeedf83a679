"""Error statistics of every matrix of a file in many formats: which tensors can take which format?

This is no job of a sweep: nothing is trained, and the file may come from anywhere. Rows have the columns of
stats.jsonl, the shape, the bits of the format, and a note where a format cannot hold the matrix.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hqsweep.config.recipe_files import FORMAT, recipe_file
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.spec import NAMES
from hqsweep.jobs.probe.tensor_files import Matrix
from hqsweep.ops.stats import finite_or_none
from hqsweep.ops.stream import DIRECTIONS, stream_statistics
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.argument import recipe_of
from hqsweep.recipe.listing import slots
from hqsweep.track.tables import ERRORS

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
