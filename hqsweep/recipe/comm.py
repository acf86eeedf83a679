"""Comm: the format in which each data-parallel rank's gradient is exchanged, emulated in one process.

A step's batch is split into `ranks` parts. The gradient of each part is rounded before the gradients are added in FP32,
in the order of the parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hqsweep.errors import UserError, nearest
from hqsweep.formats import Format, parse

WIDTH = 128
"""The row length of a gradient in memory order, which is rounded row by row."""
RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Comm:
    """The exchange of gradients between `ranks` ranks in a format."""

    format: Format
    ranks: int = RANKS

    @classmethod
    def parse(cls, value: object, where: str) -> "Comm":
        """Return the exchange of {format, ranks}, or of a format for RANKS ranks. where: starts every error."""
        fields = value if isinstance(value, Mapping) else {"format": value}
        unknown = [key for key in fields if key not in ("format", "ranks")]
        if unknown or not isinstance(fields.get("format"), str):
            hint = nearest(unknown[0], ("format", "ranks")) if unknown else ""
            raise UserError(f"{where} is {value!r}; it takes a format, such as bf16, or {{format, ranks}}{hint}")
        ranks = fields.get("ranks", RANKS)
        if type(ranks) is not int or ranks < 1:
            raise UserError(f"{where}.ranks: got {ranks!r}; it must be an integer of 1 or more")
        try:
            format = parse(fields["format"])
        except UserError as error:
            raise UserError(f"{where}.format: {error}") from None
        if format.rht or format.two_d or format.delayed:
            raise UserError(
                f"{where}.format: {format} has a transform, tiles of several rows, or scales of earlier steps; give a"
                " format whose scales are of the gradient itself, such as bf16, fp8_current, mxfp8 or nvfp4+sr"
            )
        return cls(format=format, ranks=ranks)

    def to_config(self) -> dict[str, str | int]:
        """Return the mapping that parse() takes."""
        return {"format": str(self.format), "ranks": self.ranks}

    def __str__(self) -> str:
        return f"{self.format} between {self.ranks} ranks"
