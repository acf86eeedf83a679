"""What ranks that hold parts of one whole agree on: amaxes of the whole, and the values of blocks that a cut divides.

Then each rank quantizes its part by the ordinary kernels, and has the bytes that the whole has there. All weights of a
step go through three collectives at most: the missing rows, the amaxes, and the amaxes of what is made from decoded
rows. Weights of experts of which ranks have equal rows, or columns, go through those of group_part, each by itself.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, Format, RngKey
from hqsweep.ops.quantize.amax import NO_SEARCH, Search, find_amax
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.ops.quantize.request import Output, Target
from hqsweep.parallel.shards.shard_areas import Write, is_group, matrices_of, operands_of_covers, own_area, source_area
from hqsweep.parallel.shards.shard_place import Place
from hqsweep.parallel.wire import wide_copy
from hqsweep.parallel.wire.collectives import maximum_
from hqsweep.parallel.wire.exchange import Area, Exchange
from hqsweep.quant.delayed import SlotStates, grids_of, note
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, joined
from hqsweep.torch_private import foreach_copy_

WORD = 4
"""Bytes of a word in copies of many tensors: a thread block of torch's moves 65,536 words, and few of them would leave
most of a GPU idle."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A matrix that is a part of a whole, and what is to be made of it (HybridQuantizer.quantize). It holds whole
    blocks of its formats."""

    pieces: Sequence[tuple[Tensor, Place]]
    """Its values [rows, cols], and where they lie in the whole, which decides their random bits; several, one after the
    other along an axis, where the part does not lie together there."""
    axis: int = 0
    """The axis along which pieces follow each other."""
    quantizer: HybridQuantizer
    rowwise: Output | None = "codes"
    columnwise: Output | None = "codes"
    key: RngKey | None = None
    states: SlotStates | None = None
    layer: str = ""
    """The layer whose weight it is, for messages (ops.nonfinite)."""
    cut_rows: bool = False
    """Whether the rows of the whole lie over several ranks, which then agree on amaxes of rows, too; the same on all
    ranks."""
    group: Any = None
    """The process group whose ranks have other parts of the same whole, beside those that quantize this one together;
    None: there are none."""
    grids: dict[str, Buffers] = field(default_factory=dict)
    """Direction -> the amax of the whole, as far as it is known, or those of all rows of the whole."""

    @property
    def dequantized(self) -> bool:
        """Whether the columnwise operand is made from the decoded rowwise one."""
        return self.columnwise is not None and self.quantizer.columnwise_source == "rowwise_dequantized"

    @property
    def has_rows(self) -> bool:
        """Whether the grids have, or get, amaxes of all rows of the whole."""
        row = self.formats.get("rowwise")
        return self.cut_rows and row is not None and row.row_scaled

    def grids_of(self, x: Tensor, place: Place) -> dict[str, Buffers]:
        """The grids of a piece."""
        if not self.has_rows:
            return self.grids
        rows = {name: amaxes.narrow(0, place.first_row, len(x)) for name, amaxes in self.grids["rowwise"].items()}
        return self.grids | {"rowwise": rows}

    @property
    def formats(self) -> dict[str, Format]:
        """Direction -> the format that is encoded, because its operand is wanted or decoded for the other."""
        wanted = {"rowwise": self.rowwise is not None or self.dequantized, "columnwise": self.columnwise is not None}
        return {direction: getattr(self.quantizer, direction) for direction, needed in wanted.items() if needed}


def quantize_parts(parts: Sequence[Part], group: Any) -> list[HybridOperand]:
    """The operands of every part under the amaxes of its whole, which lies over the ranks of the group, and those of
    its own group.

    All these ranks call this with their parts of the same matrices, in the same order. States of delayed scaling give
    amaxes and take those of the whole. group None: no other rank has a part but those of the part's group.
    """
    for part in parts:
        if part.states:
            grids = grids_of([part.states], part.formats)
            part.grids.update({direction: of_slots[0] for direction, of_slots in grids.items()})
    _agree(parts, _find, group)
    _agree(parts, _find_decoded, group)
    operands = [_quantized(part) for part in parts]
    _agree(parts, _note, group)
    return operands


def _agree(parts: Sequence[Part], find: Callable[[Part], list[Tensor]], group: Any) -> None:
    """Make the amaxes that are found in each part the largest of its whole."""
    groups: dict[Any, list[Tensor]] = {group: []}
    for part in parts:
        amaxes = find(part)
        for each in {group, part.group}:
            groups.setdefault(each, []).extend(amaxes)
    for each, amaxes in groups.items():
        if amaxes and each is not None:
            maximum_(amaxes, each)


def _quantized(part: Part) -> HybridOperand:
    wanted = {"rowwise": part.rowwise, "columnwise": part.columnwise, "key": part.key}
    with for_slot(part.layer, "weight", part.quantizer, part.pieces[0][0]):
        pieces = [
            part.quantizer.quantize_given(x, part.grids_of(x, place), place=place, **wanted) for x, place in part.pieces
        ]
    return joined(pieces, part.axis)


def _has_one_amax(format: Format | None) -> bool:
    """Whether a format has one amax of the whole, which is found when the whole is quantized."""
    return format is not None and format.amax_name is not None and not (format.delayed or format.row_scaled)


def _find(part: Part) -> list[Tensor]:
    """The amaxes of x for the directions that are made from x, found for this part and noted in its grids."""
    row = part.formats.get("rowwise")
    column = None if part.dequantized else part.formats.get("columnwise")
    (first, place), amaxes = part.pieces[0], dict[str, Tensor]()
    for direction, format in (("rowwise", row), ("columnwise", column)):
        if _has_one_amax(format):
            same = direction == "columnwise" and "rowwise" in amaxes and not format.rht
            amaxes[direction] = amaxes["rowwise"] if same else first.new_zeros(1, 1, dtype=torch.float32)
            part.grids[direction] = {format.amax_name: amaxes[direction]}
    if part.has_rows:
        amaxes["rowwise"] = first.new_zeros(place.rows_of_whole, 1, dtype=torch.float32)
        part.grids["rowwise"] = {row.amax_name: amaxes["rowwise"]}
    if first.numel() and amaxes:
        columnwise, same = amaxes.get("columnwise"), amaxes.get("columnwise") is amaxes.get("rowwise")
        columns = NO_SEARCH if columnwise is None or same else Search(column, columnwise)
        for x, place in part.pieces:
            rowwise = part.grids_of(x, place)["rowwise"][row.amax_name] if "rowwise" in amaxes else None
            find_amax(x, NO_SEARCH if rowwise is None else Search(row, rowwise), columns)
    return list({id(amax): amax for amax in amaxes.values()}.values())


def _find_decoded(part: Part) -> list[Tensor]:
    """The columnwise amax of decoded rows, where the columnwise operand is made from them."""
    row, column = part.formats.get("rowwise"), part.formats.get("columnwise")
    if not (part.dequantized and _has_one_amax(column)):
        return []
    amax = part.pieces[0][0].new_zeros(1, 1, dtype=torch.float32)
    part.grids["columnwise"] = {column.amax_name: amax}
    for x, place in part.pieces if part.pieces[0][0].numel() else ():
        known = part.grids_of(x, place).get("rowwise", {}).get(row.amax_name)
        own = x.new_zeros(len(x), 1, dtype=torch.float32) if row.row_scaled and known is None else None
        rowwise = Search(row, own, known, part.quantizer.direction_keys(part.key, place)["rowwise"])
        find_amax(x, rowwise, Search(column, amax), columnwise_source="rowwise_dequantized")
    return [amax]


def _note(part: Part) -> list[Tensor]:
    """The present amaxes of the states of a tensor that is held, into which those of x are merged."""
    if not part.states:
        return []
    for x, place in part.pieces if part.pieces[0][0].numel() else ():
        key = part.quantizer.direction_keys(part.key, place)["rowwise"]
        source = part.quantizer.columnwise_source if part.columnwise else "original"
        row = Target(part.quantizer.rowwise, key=key, grid=part.grids_of(x, place).get("rowwise"))
        with for_slot(part.layer, "weight", part.quantizer, x):
            note([part.states], x, None, part.formats, source, row)
    held = part.states.held and part.states.record
    return [part.states.states[d].history[:1] for d in part.states.delayed(part.formats)] if held else []


def quantize_shards_(
    tensors: Sequence[Any], values: Sequence[Tensor], keys: Sequence[RngKey | None] | None = None, group: Any = None
) -> None:
    """Overwrite quantized tensors, each of which is a shard of a whole (its metadata has a place), with these values.
    Every rank gives the values of its own shard, in the shard's shape.

    The bytes are those of the whole quantized at once: rows of a block that a cut divides come from the ranks that have
    them, amaxes are the largest over the ranks, and random bits are those of the element's place in the whole. All
    ranks of the group call this with their shards of the same weights, in the same order; rows travel in the source
    dtype. The first call with new places is slower, as ranks tell them to each other. Tensors without a place are
    written as they are. keys: by default each tensor's next.

    group None: the shards cut no blocks and share no amaxes, else UserError. UserError as quantize_() raises it.
    """
    writes: list[Write] = []
    for tensor, x, key in zip(tensors, values, keys or [None] * len(tensors), strict=True):
        if tensor.metadata.place is None:
            tensor.quantize_(x, key=key)
            continue
        x, key = tensor.begin_write(x, key)
        if tensor.is_meta or x.is_meta:
            tensor.end_write(None, x, key)
        elif (part := tensor.even_part(group)) is not None:
            with torch.no_grad():
                tensor.end_write(tensor.encode(x.to(tensor.device, tensor.source_dtype), key, part), x, key)
        else:
            writes.append((tensor, x, key))
    with torch.no_grad():
        matrices = [matrix for write in writes for matrix in matrices_of(*write)]
        shards, held = [tensor for tensor, _, _ in matrices], [[own_area(tensor)] for tensor, _, _ in matrices]
        values = [x.to(t.device).reshape(t.metadata.matrix) for t, x, _ in matrices]
        pieces = [[x] for x in _rounded(values, [t.source_dtype for t in shards])]
        sources = gather_sources(shards, held, pieces, group, known_by=[tensor.shared for tensor, _, _ in writes])
        write_shards_(matrices, sources, group)
    for tensor, _, key in writes:
        if is_group(tensor):
            tensor.note_write(key)


def gather_sources(
    tensors: Sequence[Any],
    held: Sequence[Sequence[Area]],
    pieces: Sequence[Sequence[Tensor]],
    group: Any,
    *,
    known_by: Sequence[Any] = (),
) -> list[tuple[Tensor, bool]]:
    """Return for each tensor the values that its operands are made from, and whether rows of the whole lie over several
    ranks. The values are [rows, cols] of source_area() in the source dtype; they come from the areas of the whole that
    this rank holds, whose values are the pieces, and from the other ranks.

    known_by: what all views of the tensors have in common, where these always bring the same areas: there the exchange
    is remembered, so that ranks tell areas to each other once, and not at every call.
    """
    if not tensors:
        return []
    held, needed = tuple(map(tuple, held)), tuple(source_area(tensor) for tensor in tensors)
    if group is None:
        _refuse_lonely(tensors, held, needed)
        return [(own[0], False) for own in pieces]
    exchange = _remembered(known_by, held, needed, group) if known_by else Exchange(held, needed, group)
    values = exchange.run(pieces, [tensor.source_dtype for tensor in tensors], tensors[0].device)
    return list(zip(values, exchange.cut_rows, strict=True))


def write_shards_(writes: Sequence[Write], sources: Sequence[tuple[Tensor, bool]], group: Any) -> None:
    """Write shards of matrices, from the values of gather_sources()."""
    parts = [_part(tensor, *source, key) for (tensor, _, key), source in zip(writes, sources, strict=True)]
    copies: list[tuple[Tensor, Tensor]] = []
    for (tensor, *_), operands in zip(writes, quantize_parts(parts, group), strict=True):
        copies += tensor.copies(operands_of_covers(tensor, operands))
    _copy_(copies)
    for tensor, x, key in writes:
        tensor.end_write(None, x, key)


def _rounded(values: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Each tensor in its dtype."""
    rounded = [
        x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x, dtype in zip(values, dtypes, strict=True)
    ]
    _copy_([(own, x) for own, x in zip(rounded, values, strict=True) if own is not x])
    return rounded


def _copy_(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, in few launches for all of a kind, which move codes as
    words."""
    kinds: dict[Any, list[Sequence[Tensor]]] = {}
    for target, source in pairs:
        if target.dtype == source.dtype:
            target, source = wide_copy.as_words(target, source, most=WORD)
        kinds.setdefault((target.dtype, source.dtype, target.stride() == source.stride()), []).append((target, source))
    for alike in kinds.values():
        foreach_copy_(*map(list, zip(*alike, strict=True)))


def _part(tensor: Any, x: Tensor, cut_rows: bool, key: RngKey | None) -> Part:
    meta = tensor.metadata
    wanted = {direction: "codes" if direction in meta.directions else None for direction in DIRECTIONS}
    states = tensor.states and tensor.states.written()
    area, shared, options = source_area(tensor), tensor.part, {"quantizer": meta.quantizer, "key": key}
    pieces = [(x, Place.of(area, meta.place.whole))]
    if shared is not None:  # the place is one in the part of the ranks that share the matrix
        of_part = cut_rows and meta.quantizer.rowwise.row_scaled and shared.axis == 0  # whose rows are no other rank's
        cut_rows, options = cut_rows or shared.axis == 1, options | {"axis": shared.axis, "group": shared.group}
        if meta.quantizer.stochastic or of_part:
            pieces = [(own.of(x, area), place) for own, place in shared.placed(area, meta.place.whole)]
    return Part(pieces=pieces, **wanted, states=states, layer=tensor.shared.layer, cut_rows=cut_rows, **options)


def _remembered(known_by: Sequence[Any], held: tuple, needed: tuple, group: Any) -> Exchange:
    """The exchange of shards, which the first of them remembers for as long as it is written together with the same
    others.

    It is found by the tensors themselves and not by their areas: where a program makes tensors anew it does so on every
    rank, and then all of them, or none, tell the others their areas. A rank's own areas may be those of another set.
    """
    first, *others = known_by
    same = (held, needed, group)
    known = first.exchanges.get(len(known_by))
    if known is None or known[0] != same or any(ref() is not o for ref, o in zip(known[1], others, strict=True)):
        known = first.exchanges[len(known_by)] = same, [weakref.ref(o) for o in others], Exchange(held, needed, group)
    return known[2]


def _refuse_lonely(tensors: Sequence[Any], held: Sequence[Sequence[Area]], needed: Sequence[Area]) -> None:
    """UserError for a tensor that needs other ranks, whose group is not given."""
    for tensor, own, area in zip(tensors, held, needed, strict=True):
        meta = tensor.metadata
        whole = meta.matrix if meta.place is None else meta.place.whole
        formats = [getattr(meta.quantizer, direction) for direction in meta.directions]
        shares = area.shape != whole and any(f.amax_name and not f.row_scaled for f in formats)
        if list(own) != [area] or shares:
            why = "shares an amax with the rest" if shares else "needs what it does not hold"
            raise UserError(
                f"a shard {tuple(meta.matrix)} of a weight {tuple(whole)} in {meta.quantizer} {why}; give group=, the"
                " process group whose ranks hold the whole"
            )
