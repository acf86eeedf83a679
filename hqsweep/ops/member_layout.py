"""What follows for the packed buffers of a group from the shapes of its members alone."""

import math
from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import Buffer, Format


class MemberLayout:
    """Base of GroupLayout and ShapesLayout: where the members of a group lie in memory."""

    columnwise: bool
    """Members encode the transpose [k_e, m_e] of [m_e, k_e]."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the members, as they are encoded."""
        raise NotImplementedError

    def check(self, format: Format) -> None:
        """UserError, naming the expert, for a member that the format cannot hold."""
        for expert, shape in enumerate(self.shapes):
            try:
                format.check_shape(*shape)
            except UserError as error:
                raise UserError(f"expert {expert}: {error}") from None

    def views(self, flat: Tensor, shapes: Sequence[tuple[int, int]], *, by_rows: bool = False) -> list[Tensor]:
        """Members of a packed buffer, which may have room to spare; by_rows: they lie there transposed."""
        sizes = [math.prod(shape) for shape in shapes]
        parts = flat[: sum(sizes)].split_with_sizes(sizes)
        if by_rows:
            return [part.view(shape[::-1]).t() for part, shape in zip(parts, shapes, strict=True)]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer_shapes(self, format: Format, name: str) -> list[tuple[int, int]]:
        """Of one buffer of every member."""
        return [format.layout[name].shape(*shape) for shape in self.shapes]

    def least(self, buffer: Buffer | None) -> int:
        """The fewest entries that a packed buffer can have (None: of elements), those of rows left over included."""
        return 0


def refuse_unlike(
    shapes: Sequence[tuple[int, int]], what: str, *, one_width: bool = False, instead: str = ""
) -> NoReturn:
    """UserError of what takes members of one shape, or of one width; it names the first that has another."""
    first = shapes[0]
    other = next(e for e, (m, k) in enumerate(shapes) if k != first[1] or (m != first[0] and not one_width))
    raise UserError(
        f"{what} takes members of one {'width' if one_width else 'shape'}, and member {other} is"
        f" {list(shapes[other])}, member 0 {list(first)}{instead}"
    )
