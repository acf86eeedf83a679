"""The modules that an override applies to: a choice of layers, by index or from either end."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hqsweep.errors import UserError
from hqsweep.recipe.roles import QuantizerRole

_ENDS = re.compile(r"(first|last)\(\s*([0-9.]+)\s*\)")
_TAKES = (
    "it takes an index, a list of indices (negative ones count from the end), first(N) or last(N), N being a number of"
    " layers or a fraction below 1"
)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A choice of layers: indices, or the first or last `count` layers. A fraction is rounded up to at least one
    layer."""

    end: Literal["first", "last"] | None = None
    count: Fraction = Fraction(0)
    indices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, value: object, where: str) -> "Layers":
        """Return the choice of 11, [0, -1], "first(2)" or "last(0.15)". where: starts the error."""
        indices = [value] if isinstance(value, int) else value
        if isinstance(indices, list | tuple) and indices and all(type(i) is int for i in indices):
            return cls(indices=tuple(sorted(set(indices))))
        match = _ENDS.fullmatch(value.strip()) if isinstance(value, str) else None
        count = _count(match[2]) if match else None
        if count is None:
            raise UserError(f"{where}: got {value!r}; {_TAKES}")
        return cls(end=match[1], count=count)

    def to_config(self) -> str | list[int]:
        """Return the value that parse() takes."""
        return str(self) if self.end else list(self.indices)

    def __str__(self) -> str:
        count = int(self.count) if self.count.denominator == 1 else float(self.count)
        return f"{self.end}({count})" if self.end else ", ".join(map(str, self.indices))

    @property
    def relative(self) -> bool:
        """Whether the choice depends on the number of layers."""
        return self.end is not None or any(i < 0 for i in self.indices)

    def of(self, layers: Sequence[int]) -> set[int]:
        """Return the chosen layers of a model. layers: its layers in order."""
        if self.end is None:
            return {i if i >= 0 else layers[i] for i in self.indices if i >= 0 or -i <= len(layers)} & set(layers)
        count = int(self.count) if self.count >= 1 else math.ceil(self.count * len(layers))
        return set(layers[:count] if self.end == "first" else layers[max(0, len(layers) - count) :])


def layers_of(roles: Sequence[QuantizerRole]) -> list[int]:
    """Return the layer indices of the roles' modules, in order."""
    return sorted({role.layer for role in roles if role.layer is not None})


def _count(text: str) -> Fraction | None:
    """Return the number in a text if it is positive, and whole when it is 1 or more; else None."""
    try:
        count = Fraction(text)
    except ValueError:
        return None
    return count if 0 < count < 1 or (count >= 1 and count.denominator == 1) else None
