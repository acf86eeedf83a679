"""Quantized weights from FP32 masters that lie over ranks as flat fragments, as a distributed optimizer has them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hqsweep.dist.exchange import areas_of_interval
from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.quant.agree import gather_sources, own_area, source_area, write_shards_


def quantize_master_weights(
    weights: Sequence[Any],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int | None],
    group: Any = None,
    *,
    keys: Sequence[RngKey | None] | None = None,
) -> None:
    """Overwrite quantized weights, whole or shards, with their masters, of which every rank has a flat fragment.

    weights: HybridQuantizedTensor or GroupedTensor in any formats and directions, the same on all ranks of the group
    (or each rank's shards of them). masters: this rank's fragment of each, flat, of any floating dtype; None where it
    has none. offsets: where that begins in the whole weight, counted in elements row by row; any number. Together the
    fragments of all ranks are the whole weight. keys: streams of +sr, by default each weight's next.

    The bytes are those of weight.quantize_(the whole master) in one process: values are rounded to the source dtype
    and sent to the ranks whose weights or cut blocks need them, in one all-to-all for all weights; amaxes of shards are
    the largest over the ranks. group None: each fragment is what its weight needs. Replaces TransformerEngine's
    quantize_master_weights (pytorch/tensor/utils.py:204 at d0067d0da6cb), which takes no MXFP8, NVFP4 or block scales
    within hybrids. UserError for fragments that do not lie in their weights, or leave elements out.
    """
    held, pieces = [], []
    for index, (weight, master, offset) in enumerate(zip(weights, masters, offsets, strict=True)):
        areas, values = [], []
        if master is not None and master.numel():
            place, matrix = weight.metadata.place, weight.metadata.matrix
            rows, cols = matrix if place is None else place.whole
            _check(index, master, offset, (rows, cols))
            areas = areas_of_interval(offset, offset + master.numel(), cols)
            parts = master.detach().to(weight.device, weight.source_dtype).split([area.size for area in areas])
            values = [part.view(area.shape) for part, area in zip(parts, areas, strict=True)]
        held.append(areas)
        pieces.append(values)
    writes, sources = [], []
    with torch.no_grad():
        gathered = gather_sources(weights, held, pieces, group)
        for weight, (x, cut_rows), key in zip(weights, gathered, keys or [None] * len(weights), strict=True):
            if weight.metadata.place is None:
                weight.quantize_(x.reshape(weight.shape), key=key)
                continue
            own = own_area(weight).of(x, source_area(weight)).reshape(weight.shape)
            writes.append((weight, *weight.begin_write(own, key)))
            sources.append((x, cut_rows))
        write_shards_(writes, sources, group)


def _check(index: int, master: Tensor, offset: int | None, whole: tuple[int, int]) -> None:
    """UserError for a fragment that is none of a weight of this shape."""
    numel = math.prod(whole)
    if master.dim() != 1 or offset is None or not 0 <= offset <= numel - master.numel():
        raise UserError(
            f"quantize_master_weights: master {index} is {tuple(master.shape)} at offset {offset}; it takes a flat"
            f" fragment that lies within the {numel} elements of a weight {tuple(whole)}"
        )
