"""Quantized weights from FP32 masters that lie over ranks as flat fragments, as in a distributed optimizer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.parallel.shards.raw_data import follows_rowwise
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.shards.shard_agree import gather_sources, is_group, own_area, source_area, write_shards_
from hqsweep.parallel.wire.collectives import largest_bytes_
from hqsweep.parallel.wire.exchange import areas_of_interval
from hqsweep.quant.operand import narrow
from hqsweep.quant.tensor import HybridQuantizedTensor, check_quantized


class _Source(NamedTuple):
    """A weight and this rank's fragment of its master."""

    weight: Any
    master: Tensor | None
    offset: int | None
    key: RngKey | None


def quantize_master_weights(
    weights: Sequence[Any],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int | None],
    group: ProcessGroup | None = None,
    *,
    keys: Sequence[RngKey | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Overwrite quantized weights, or shards, with their masters, which lie over the ranks as flat fragments. A
    collective.

    weights: HybridQuantizedTensor or GroupedTensor in any formats and directions, the same on all ranks of the group,
    or each rank's shards of them. masters: this rank's fragment of each master, flat, of any floating dtype; None where
    it has no fragment. offsets: the element of the whole weight, counted row by row, where the fragment begins. The
    fragments of all ranks together are the whole weight. keys: keys of +sr; default: each weight's next key. group
    None: each fragment is all that its weight needs.

    The weights get the bytes of weight.quantize_(the whole master) in one process. Values are rounded to the source
    dtype, and sent in one all-to-all for all weights to ranks whose weights or cut blocks need them. Amaxes of shards
    are the largest over the ranks.

    manual_post_all_gather_processing: the caller gathers raw data afterwards, and then calls
    post_all_gather_processing(). Weights for which takes_rows() is true get only these bytes on each rank:
    - the rowwise codes of the rows that its fragment touches, of which the bytes from offset * bits / 8 to before
      (offset + numel) * bits / 8 are its own raw data,
    - all rowwise scales.

    Values are then sent only for rows and blocks that a fragment cuts. A preserved initial value is cleared. No
    product, copy or file takes such a weight before the processing. Other weights are written whole.

    Replaces TransformerEngine's quantize_master_weights (pytorch/tensor/utils.py:204 at d0067d0da6cb), which takes no
    MXFP8, NVFP4 or block scales within hybrids. UserError for weights that are not held quantized, fragments that do
    not lie in their weights, and elements without a fragment.
    """
    keys = keys or [None] * len(weights)
    counts = [len(each) for each in (weights, masters, offsets, keys)]
    if len(set(counts)) > 1:
        raise UserError(
            "quantize_master_weights: got {} weights, {} masters, {} offsets and {} keys; each weight has one of"
            " each".format(*counts)
        )
    every = [_Source(*each) for each in zip(weights, masters, offsets, keys, strict=True)]
    for index, source in enumerate(every):
        _check(index, source)
    by_rows: dict[bool, list[_Source]] = {True: [], False: []}
    for source in every:
        by_rows[manual_post_all_gather_processing and takes_rows(source.weight)].append(source)
    with torch.no_grad():
        _write_rows(by_rows[True], group)
        _write(by_rows[False], group)


def takes_rows(weight: Any) -> bool:
    """Return whether quantize_master_weights(manual_post_all_gather_processing=True) writes only this rank's rows.

    True for one whole matrix that no other rank shares, if the columnwise operand follows from the rowwise one or is
    not held. replace_raw_data must have moved nothing but its codes.
    """
    meta = weight.metadata
    whole = meta.place is None and meta.content.splits is None and weight.part is None and not meta.shares_scale
    follows = meta.directions == ("rowwise",) or follows_rowwise(weight)
    return whole and follows and (weight.shared.moved != "all" or len(meta.stored) == 1)


def _write(every: Sequence[_Source], group: ProcessGroup | None) -> None:
    """Write weights, or shards, in both directions."""
    held, pieces, matrices = [], [], [matrix for source in every for matrix in _matrices(source)]
    for weight, master, offset, _ in matrices:
        areas, values = [], []
        if master is not None and master.numel():
            areas = areas_of_interval(offset, offset + master.numel(), _whole(weight)[1])
            parts = master.detach().to(weight.device, weight.source_dtype).split([area.size for area in areas])
            values = [part.view(area.shape) for part, area in zip(parts, areas, strict=True)]
        held.append(areas)
        pieces.append(values)
    writes, sources = [], []
    gathered = gather_sources([source.weight for source in matrices], held, pieces, group)
    for (weight, _, _, key), (x, cut_rows) in zip(matrices, gathered, strict=True):
        if weight.metadata.place is None:
            weight.quantize_(x.reshape(weight.shape), key=key)
            continue
        own = own_area(weight).of(x, source_area(weight)).reshape(weight.shape)
        writes.append((weight, *weight.begin_write(own, key)))
        sources.append((x, cut_rows))
    write_shards_(writes, sources, group)
    for weight, _, _, key in every:
        if _is_cut_group(weight):
            weight.note_write(weight.next_key(key))


def _is_cut_group(weight: Any) -> bool:
    """Whether a weight is a shard of every expert's matrix."""
    return weight.metadata.place is not None and is_group(weight)


def _matrices(source: _Source) -> list[_Source]:
    """The source itself; for a shard of every expert's matrix, a source for each expert."""
    weight, master, offset, key = source
    if not _is_cut_group(weight):
        return [source]
    size, content, sources = math.prod(weight.metadata.place.whole), weight.metadata.content, []
    for index, member in enumerate(weight.members):
        own = None, None
        if master is not None and master.numel():
            start, stop = (min(max(end - index * size, 0), size) for end in (offset, offset + len(master)))
            first = index * size + start - offset
            own = master[first : first + stop - start], start
        sources.append(_Source(member, *own, content.key_of(key, index)))
    return sources


def _write_rows(every: Sequence[_Source], group: ProcessGroup | None) -> None:
    """Write the rowwise codes of the rows that this rank's fragments touch, and all rowwise scales."""
    if not every:
        return
    _check_complete(every, group)
    rows, scales = [_rows(source) for source in every], []
    _write([source._replace(weight=own) for source, own in zip(every, rows, strict=True)], group)
    for (weight, *_), own in zip(every, rows, strict=True):
        cover, operand = own.metadata.cover("rowwise"), weight.rowwise
        of_others = [buffer for name, buffer in operand.buffers.items() if name != "q"]
        for buffer in of_others:
            buffer.zero_()  # the largest byte comes from the rank that has written it
        if cover.size:
            for name, buffer in narrow(operand, 0, cover.first_row, cover.last_row).buffers.items():
                buffer.copy_(own.rowwise.buffers[name])
        scales += of_others
    if group is not None:
        largest_bytes_(scales, group)
    for (weight, *_), own in zip(every, rows, strict=True):
        weight.clear_high_precision_init_val()
        weight.shared.is_partial = True
        weight.note_write(own.metadata.key)


def _rows(source: _Source) -> HybridQuantizedTensor:
    """An empty rowwise shard of the rows that a fragment touches."""
    (weight, master, offset, _), (rows, cols) = source, source.weight.metadata.matrix
    first = last = 0
    if master is not None and master.numel():
        first, last = offset // cols, -(-(offset + master.numel()) // cols)
    options = {"dtype": weight.dtype, "source_dtype": weight.source_dtype, "device": weight.device}
    options |= {"directions": ("rowwise",), "key": weight.metadata.key, "place": Place(first, 0, rows, cols)}
    shard = HybridQuantizedTensor.empty((last - first, cols), weight.quantizer, **options)
    shard.states = weight.states
    return shard


def _whole(weight: Any) -> tuple[int, int]:
    """The shape of the whole weight, or of each expert's whole weight."""
    place = weight.metadata.place
    return weight.metadata.matrix if place is None else place.whole


def _check(index: int, source: _Source) -> None:
    """UserError for a weight that is not held, and for a fragment that does not lie in its weight."""
    weight, master, offset, _ = source
    check_quantized(weight, "quantize_master_weights")
    if master is None or not master.numel():
        return
    whole = ((weight.metadata.content.count,) if _is_cut_group(weight) else ()) + tuple(_whole(weight))
    numel = math.prod(whole)
    if master.dim() != 1 or offset is None or not 0 <= offset <= numel - master.numel():
        raise UserError(
            f"quantize_master_weights: master {index} is {tuple(master.shape)} at offset {offset}; it takes a flat"
            f" fragment that lies within the {numel} elements of a weight {whole}"
        )


def _check_complete(every: Sequence[_Source], group: ProcessGroup | None) -> None:
    """UserError, the same on all ranks, for a weight with elements in no fragment. Their rows would keep old values."""
    own = [(offset or 0, 0 if master is None else master.numel()) for _, master, offset, _ in every]
    announced: list[Any] = [own]
    if group is not None:
        announced = [None] * dist.get_world_size(group)
        dist.all_gather_object(announced, own, group=group)
    for (weight, *_), *fragments in zip(every, *announced, strict=True):
        reached, numel = 0, math.prod(_whole(weight))
        for offset, count in sorted(fragments):
            reached = max(reached, offset + count) if offset <= reached else reached
        if reached < numel:
            raise UserError(
                f"quantize_master_weights: the fragments of a weight {tuple(_whole(weight))} bring its first {reached}"
                f" elements and not all {numel}; every rank of the group brings its own part of one whole"
            )
