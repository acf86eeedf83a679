"""Quantize shards with the bytes of their whole: ranks exchange what a shard alone does not know.

That is the amaxes of the whole, and the values of blocks that a cut divides. Each rank then quantizes its part by the
ordinary kernels. All weights of a step need three collectives at most: for the missing rows, for the amaxes, and for
the amaxes of decoded rows. Weights of experts whose rows or columns are shared out evenly use quantize_group_part, one
weight at a time.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.formats import Buffers, Format, RngKey
from hqsweep.ops.quantize.amax import NO_SEARCH, Search, find_amax
from hqsweep.ops.quantize.nonfinite import for_slot
from hqsweep.ops.quantize.request import Output, Target
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.wire import memory
from hqsweep.parallel.wire.collectives import maximum_
from hqsweep.parallel.wire.exchange import Area, Exchange
from hqsweep.quant.delayed import SlotStates, grids_of, note
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, joined, narrow
from hqsweep.torch_private import foreach_copy_

Write = tuple[Any, Tensor, RngKey | None]
"""A quantized tensor, its new values, and the key of their random bits."""


def is_group(tensor: Any) -> bool:
    """Whether a tensor is many matrices."""
    return tensor.metadata.content.splits is not None


def matrices_of(tensor: Any, x: Tensor, key: RngKey | None) -> list[Write]:
    """Return the writes of single matrices in a write of a shard: one for each expert."""
    if not is_group(tensor):
        return [(tensor, x, key)]
    content = tensor.metadata.content
    return [(own, x[i], content.key_of(key, i)) for i, own in enumerate(tensor.members)]


def own_area(tensor: Any) -> Area:
    """The area of the whole that a tensor has."""
    meta = tensor.metadata
    return Area(0, meta.matrix[0], 0, meta.matrix[1]) if meta.place is None else meta.place.area(meta.matrix)


def source_area(tensor: Any) -> Area:
    """Return the area of the whole whose values make the operands of a tensor."""
    meta = tensor.metadata
    if meta.place is None:
        return own_area(tensor)
    decodes = "columnwise" in meta.directions and meta.quantizer.columnwise_source == "rowwise_dequantized"
    directions = sorted({*meta.directions, *(["rowwise"] if decodes else [])})
    return meta.place.sources([(getattr(meta.quantizer, name), name) for name in directions], meta.matrix)


def operands_of_covers(tensor: Any, operands: HybridOperand) -> HybridOperand:
    """The operands of a shard's covers, from the operands of its source_area()."""
    area = source_area(tensor)
    cut: dict[str, Operand | None] = {"rowwise": operands.rowwise, "columnwise": operands.columnwise}
    for direction in tensor.metadata.directions:
        cut[direction] = operand_of_area(cut[direction], direction, area, tensor.metadata.cover(direction))
    return HybridOperand(**cut)


def operand_of_area(operand: Operand, direction: str, area: Area, part: Area) -> Operand:
    """Return the operand of `part`, as views of the buffers of an operand that encodes `area`.

    UserError for a part that cuts blocks.
    """
    if part == area:
        return operand
    rows, cols = (0, 1) if direction == "rowwise" else (1, 0)
    operand = narrow(operand, rows, part.first_row - area.first_row, part.last_row - area.first_row)
    return narrow(operand, cols, part.first_col - area.first_col, part.last_col - area.first_col)


WORD = 4
"""Bytes of a unit in copies of many tensors. torch's thread blocks move 65,536 units each, so wider units would leave
most of a GPU idle."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """A matrix that is a part of a whole, and which operands to make of it (HybridQuantizer.quantize). It holds whole
    blocks of its formats."""

    pieces: Sequence[tuple[Tensor, Place]]
    """(values [rows, cols], place in the whole) of each piece; the place decides the random bits. A part that is apart
    in the whole has several pieces, which follow each other along `axis`."""
    axis: int = 0
    """The axis along which pieces follow each other."""
    quantizer: HybridQuantizer
    rowwise: Output | None = "codes"
    columnwise: Output | None = "codes"
    key: RngKey | None = None
    states: SlotStates | None = None
    layer: str = ""
    """The name of the weight's layer, for messages (ops.quantize.nonfinite)."""
    cut_rows: bool = False
    """Whether rows of the whole lie over several ranks, which then agree on amaxes of rows, too. The same on all
    ranks."""
    group: ProcessGroup | None = None
    """The process group of ranks with other parts of the same whole, beside the ranks that quantize this part together;
    None without such ranks."""
    grids: dict[str, Buffers] = field(default_factory=dict)
    """Direction -> the amax of the whole, or the amaxes of all its rows or columns, as far as they are known."""

    @property
    def dequantized(self) -> bool:
        """Whether the columnwise operand is made from the decoded rowwise one."""
        return self.columnwise is not None and self.quantizer.columnwise_source == "rowwise_dequantized"

    @property
    def has_rows(self) -> bool:
        """Whether the grids have, or get, amaxes of all rows of the whole."""
        row = self.formats.get("rowwise")
        return self.cut_rows and row is not None and row.row_scaled

    @property
    def has_columns(self) -> bool:
        """Whether the grids have, or get, amaxes of all columns of the whole."""
        column = self.formats.get("columnwise")
        return column is not None and column.row_scaled

    def grids_of(self, x: Tensor, place: Place) -> dict[str, Buffers]:
        """The grids of one piece."""
        spans = {"rowwise": (place.first_row, x.shape[0])} if self.has_rows else {}
        spans |= {"columnwise": (place.first_col, x.shape[1])} if self.has_columns else {}
        return {
            direction: {name: amaxes.narrow(0, *spans[direction]) for name, amaxes in grid.items()}
            if direction in spans
            else grid
            for direction, grid in self.grids.items()
        }

    @property
    def formats(self) -> dict[str, Format]:
        """Direction -> the format that is encoded, because its operand is wanted or is decoded for the other."""
        wanted = {"rowwise": self.rowwise is not None or self.dequantized, "columnwise": self.columnwise is not None}
        return {direction: getattr(self.quantizer, direction) for direction, needed in wanted.items() if needed}


def quantize_parts(parts: Sequence[Part], group: ProcessGroup | None) -> list[HybridOperand]:
    """Return the operands of every part, under the amaxes of its whole. A collective of the group.

    All ranks give their parts of the same matrices, in the same order. States of delayed scaling give amaxes, and
    record the amaxes of the whole. group None: only the ranks of each part's own group have parts.
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


def _agree(parts: Sequence[Part], find: Callable[[Part], list[Tensor]], group: ProcessGroup | None) -> None:
    """Replace the amaxes found in each part by the largest of its whole."""
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
    """Find the amaxes of x for the directions that are made from x, and note them in the part's grids. Returns them."""
    row = part.formats.get("rowwise")
    column = None if part.dequantized else part.formats.get("columnwise")
    (first, place), amaxes = part.pieces[0], dict[str, Tensor]()
    for direction, format in (("rowwise", row), ("columnwise", column)):
        if _has_one_amax(format):
            same = direction == "columnwise" and "rowwise" in amaxes and not (format.rht or row.rht)
            amaxes[direction] = amaxes["rowwise"] if same else first.new_zeros(1, 1, dtype=torch.float32)
            part.grids[direction] = {format.amax_name: amaxes[direction]}
    if part.has_rows:
        amaxes["rowwise"] = first.new_zeros(place.rows_of_whole, 1, dtype=torch.float32)
        part.grids["rowwise"] = {row.amax_name: amaxes["rowwise"]}
    if part.has_columns and not part.dequantized:
        amaxes["columnwise"] = first.new_zeros(place.cols_of_whole, 1, dtype=torch.float32)
        part.grids["columnwise"] = {column.amax_name: amaxes["columnwise"]}
    if first.numel() and amaxes:
        same = amaxes.get("columnwise") is amaxes.get("rowwise")
        for x, place in part.pieces:
            grids, keys = part.grids_of(x, place), part.quantizer.direction_keys(part.key, place)
            rowwise = columnwise = NO_SEARCH
            if "rowwise" in amaxes:
                rowwise = Search(row, grids["rowwise"][row.amax_name], key=keys["rowwise"])
            if "columnwise" in amaxes and not same:
                columnwise = Search(column, grids["columnwise"][column.amax_name], key=keys["columnwise"])
            find_amax(x, rowwise, columnwise)
    return list({id(amax): amax for amax in amaxes.values()}.values())


def _find_decoded(part: Part) -> list[Tensor]:
    """The columnwise amax of decoded rows, where the columnwise operand is made from them."""
    row, column = part.formats.get("rowwise"), part.formats.get("columnwise")
    if not (part.dequantized and (_has_one_amax(column) or part.has_columns)):
        return []
    first, place = part.pieces[0]
    found = first.new_zeros(place.cols_of_whole if part.has_columns else 1, 1, dtype=torch.float32)
    part.grids["columnwise"] = {column.amax_name: found}
    for x, place in part.pieces if first.numel() else ():
        grids = part.grids_of(x, place)
        known, amax = grids.get("rowwise", {}).get(row.amax_name), grids["columnwise"][column.amax_name]
        own = x.new_zeros(len(x), 1, dtype=torch.float32) if row.row_scaled and known is None else None
        keys = part.quantizer.direction_keys(part.key, place)
        rowwise, columnwise = Search(row, own, known, keys["rowwise"]), Search(column, amax, key=keys["columnwise"])
        find_amax(x, rowwise, columnwise, columnwise_source="rowwise_dequantized")
    return [found]


def _note(part: Part) -> list[Tensor]:
    """Merge amaxes into the states of a held tensor, and return the states' present amaxes."""
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
    tensors: Sequence[Any],
    values: Sequence[Tensor],
    keys: Sequence[RngKey | None] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Overwrite quantized shards with values, as if their wholes were quantized at once. A collective of the group.

    tensors: each is a shard of a whole, if its metadata has a place; tensors without a place are written as they are.
    values: the values of this rank's shards, in the shards' shapes. keys: keys of random bits; default: each tensor's
    next key. All ranks of the group give their shards of the same weights, in the same order.

    Rows of a block that a cut divides come from the ranks that have them, in the source dtype. Amaxes are the largest
    over the ranks, and random bits are keyed by the element's place in the whole. The first call with new places is
    slower, because ranks tell each other these.

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
    group: ProcessGroup | None,
    *,
    known_by: Sequence[Any] = (),
) -> list[tuple[Tensor, bool]]:
    """For each tensor: the values from which its operands are made, and whether rows of the whole lie over several
    ranks.

    The values are [rows, cols] of source_area() in the source dtype. They come from the pieces, which are the areas of
    the whole that this rank holds, and from other ranks.

    known_by: an object that all views of the tensors share, if these always bring the same areas. It remembers the
    exchange, so that ranks tell each other their areas only once.
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


def write_shards_(writes: Sequence[Write], sources: Sequence[tuple[Tensor, bool]], group: ProcessGroup | None) -> None:
    """Write shards of matrices from the values of gather_sources()."""
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
    """Copy the second tensor of each pair into the first. All pairs of a kind take few launches, in wide units."""
    kinds: dict[Any, list[Sequence[Tensor]]] = {}
    for target, source in pairs:
        if target.dtype == source.dtype:
            target, source = memory.as_words(target, source, most=WORD)
        kinds.setdefault((target.dtype, source.dtype, target.stride() == source.stride()), []).append((target, source))
    for alike in kinds.values():
        foreach_copy_(*map(list, zip(*alike, strict=True)))


def _part(tensor: Any, x: Tensor, cut_rows: bool, key: RngKey | None) -> Part:
    meta = tensor.metadata
    wanted = {direction: "codes" if direction in meta.directions else None for direction in DIRECTIONS}
    states = tensor.states and tensor.states.written()
    area, shared, options = source_area(tensor), tensor.part, {"quantizer": meta.quantizer, "key": key}
    pieces = [(x, Place.of(area, meta.place.whole))]
    if shared is not None:  # its place is within the part of the ranks that share the matrix
        of_part = cut_rows and meta.quantizer.rowwise.row_scaled and shared.axis == 0  # each row is on one rank
        cut_rows, options = cut_rows or shared.axis == 1, options | {"axis": shared.axis, "group": shared.group}
        of_columns = meta.quantizer.columnwise.row_scaled and shared.axis == 1
        if meta.quantizer.stochastic or of_part or of_columns:
            pieces = [(own.of(x, area), place) for own, place in shared.placed(area, meta.place.whole)]
    return Part(pieces=pieces, **wanted, states=states, layer=tensor.shared.layer, cut_rows=cut_rows, **options)


def _remembered(known_by: Sequence[Any], held: tuple, needed: tuple, group: ProcessGroup | None) -> Exchange:
    """Return the exchange of shards. The first shard keeps it while the same shards are written together.

    The key is the set of tensors, not of areas. A program that makes new tensors does so on every rank, so that either
    all ranks or none exchange their areas. Areas are no key, because equal areas on one rank can belong to another set.
    """
    first, *others = known_by
    same = (held, needed, group)
    known = first.exchanges.get(len(known_by))
    if known is None or known[0] != same or any(ref() is not o for ref, o in zip(known[1], others, strict=True)):
        known = first.exchanges[len(known_by)] = same, [weakref.ref(o) for o in others], Exchange(held, needed, group)
    return known[2]


def _refuse_lonely(tensors: Sequence[Any], held: Sequence[Sequence[Area]], needed: Sequence[Area]) -> None:
    """UserError for a tensor that needs other ranks, where no group is given."""
    for tensor, own, area in zip(tensors, held, needed, strict=True):
        meta = tensor.metadata
        whole = meta.matrix if meta.place is None else meta.place.whole
        formats = [(direction, getattr(meta.quantizer, direction)) for direction in meta.directions]
        of_rows = [f.row_scaled and direction == "rowwise" for direction, f in formats]
        shares = area.shape != whole and any(
            f.amax_name and not own for (_, f), own in zip(formats, of_rows, strict=True)
        )
        if list(own) != [area] or shares:
            why = "shares an amax with the rest" if shares else "needs what it does not hold"
            raise UserError(
                f"a shard {tuple(meta.matrix)} of a weight {tuple(whole)} in {meta.quantizer} {why}; give group=, the"
                " process group whose ranks hold the whole"
            )
