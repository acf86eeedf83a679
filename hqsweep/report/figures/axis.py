"""Axes of the pictures: from values to pixels, and the places of the ticks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

FEW = 6
"""The approximate number of ticks of an axis of numbers."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from `low` at pixel `start` to `high` at pixel `end`; on a logarithmic axis they are powers of ten.
    `names`: those of categories, whose values are 0, 1, ... in their order."""

    start: float
    end: float
    low: float
    high: float
    log: bool = False
    names: tuple[str, ...] = ()
    signed: bool = False

    def at(self, values: Iterable[Any]) -> np.ndarray:
        """The pixels of values, float64; NaN and inf are unchanged, and so is 0 on a logarithmic axis."""
        values = list(values)
        if self.names and values and isinstance(values[0], str):
            values = [self.names.index(name) for name in values]
        places = np.asarray(values, dtype=float)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                places = np.log10(places)
        return self.start + (places - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """The ticks as (pixel, label)."""
        if self.names:
            return list(zip(self.at(range(len(self.names))).tolist(), self.names, strict=True))
        if self.log:
            return [(float(self.at([value])[0]), text) for value, text in self._log_ticks()]
        values = even_ticks(self.low, self.high, FEW)
        return [(place, self._label(value)) for place, value in zip(self.at(values).tolist(), values, strict=True)]

    def _log_ticks(self) -> list[tuple[float, str]]:
        """The ticks at powers of ten; where fewer than two are there, at 2 and 5 times one as well; without any, at
        both ends."""
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        if len(powers) > 1:
            return [(10.0**power, "10" + str(power).translate(SUPERSCRIPTS)) for power in powers]
        around = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = [lead * 10.0**power for power in around for lead in (1, 2, 5)]
        inside = [step for step in steps if self.low <= math.log10(step) <= self.high]
        return [(value, f"{value:.1g}") for value in inside or (10**self.low, 10**self.high)]

    def _label(self, value: float) -> str:
        return f"{value:+.4g}" if self.signed and value else f"{value:.6g}"


def axis_of(settings: dict[str, Any], values: list[Any], start: float, end: float, columns: bool = False) -> Axis:
    """The axis that plotly's `settings` ask for, for `values` of its traces. `columns`: the values are the names of
    columns, each a place of its own, whichever names are equal."""
    lists = [list(of_trace) for of_trace in values if of_trace is not None]
    flat = [value for of_trace in lists for value in of_trace]
    if columns or any(isinstance(value, str) for value in flat):
        names = tuple(settings.get("categoryarray") or (flat if columns else dict.fromkeys(flat)))
        low, high = -0.5, len(names) - 0.5
        if settings.get("autorange") == "reversed":
            low, high = high, low
        return Axis(start=start, end=end, low=low, high=high, names=names)
    log = settings.get("type") == "log"
    low, high = settings.get("range") or _extent(flat)
    return Axis(start=start, end=end, low=low, high=high, log=log, signed="+" in settings.get("tickformat", ""))


def _extent(values: list[Any]) -> tuple[float, float]:
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return 0.0, 1.0
    room = 0.02 * (numbers.max() - numbers.min()) or 0.5
    return float(numbers.min() - room), float(numbers.max() + room)


def even_ticks(low: float, high: float, few: int) -> list[float]:
    """About `few` multiples of 1, 2 or 5 times a power of ten between `low` and `high`."""
    step = _round_up((high - low) / few)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _round_up(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(lead * power for lead in (1, 2, 5, 10) if lead * power >= step * (1 - 1e-9))
