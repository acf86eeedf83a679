"""The areas of a whole that a shard has, and is made from; and the matrices that it consists of."""

from typing import Any

from torch import Tensor

from hqsweep.formats import RngKey
from hqsweep.parallel.wire.exchange import Area
from hqsweep.quant.operand import HybridOperand, Operand, narrow

Write = tuple[Any, Tensor, RngKey | None]
"""A quantized tensor, the values that it is given, and the key that they are quantized by."""


def is_group(tensor: Any) -> bool:
    """Whether a tensor is many matrices."""
    return tensor.metadata.content.splits is not None


def matrices_of(tensor: Any, x: Tensor, key: RngKey | None) -> list[Write]:
    """The write of each matrix that a write of a shard consists of: of every expert's."""
    if not is_group(tensor):
        return [(tensor, x, key)]
    content = tensor.metadata.content
    return [(own, x[i], content.key_of(key, i)) for i, own in enumerate(tensor.members)]


def own_area(tensor: Any) -> Area:
    """The area of the whole that a tensor has."""
    meta = tensor.metadata
    return Area(0, meta.matrix[0], 0, meta.matrix[1]) if meta.place is None else meta.place.area(meta.matrix)


def source_area(tensor: Any) -> Area:
    """The area of the whole whose values the operands of a tensor are made from."""
    meta = tensor.metadata
    if meta.place is None:
        return own_area(tensor)
    decodes = "columnwise" in meta.directions and meta.quantizer.columnwise_source == "rowwise_dequantized"
    directions = sorted({*meta.directions, *(["rowwise"] if decodes else [])})
    return meta.place.sources([(getattr(meta.quantizer, name), name) for name in directions], meta.matrix)


def operands_of_covers(tensor: Any, operands: HybridOperand) -> HybridOperand:
    """The operands of a shard's covers, from those of its source_area()."""
    area = source_area(tensor)
    cut: dict[str, Operand | None] = {"rowwise": operands.rowwise, "columnwise": operands.columnwise}
    for direction in tensor.metadata.directions:
        cut[direction] = operand_of_area(cut[direction], direction, area, tensor.metadata.cover(direction))
    return HybridOperand(**cut)


def operand_of_area(operand: Operand, direction: str, area: Area, part: Area) -> Operand:
    """The operand of a part of the area that an operand of this direction encodes, as views of its buffers; UserError
    for a part that cuts blocks."""
    if part == area:
        return operand
    rows, cols = (0, 1) if direction == "rowwise" else (1, 0)
    operand = narrow(operand, rows, part.first_row - area.first_row, part.last_row - area.first_row)
    return narrow(operand, cols, part.first_col - area.first_col, part.last_col - area.first_col)
