"""The key `factorial` of a study: factors of two levels each, and the arms of a fraction of their combinations.

A fractional design says which arms to run, and which effects they cannot tell apart. A regular fraction of 2^k arms is
a linear code over GF(2): `runs` are its words, 0 for a factor at its low level and 1 at its high one, and all-low is
always among them. The level of each factor beyond the first m is the sum, modulo 2, of the levels of a few of the first
m. A set of factors whose levels sum to 0 in every arm is a word of the defining relation. The shortest word is the
design's resolution (Box and Hunter 1961): with IV main effects are clear of two-way interactions, with V these are
clear of each other too.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import field_validator, model_validator

from hqsweep.config.section import Section
from hqsweep.errors import UserError, nearest
from hqsweep.formats.spec import QUANTIZER_FIELDS
from hqsweep.recipe.roles import TENSOR_TYPES

MOST_FACTORS = 12
FULL = "full"


@dataclass(frozen=True, kw_only=True)
class Fraction:
    """A regular fraction.

    runs   a row an arm, a column a factor: the level of each factor, 0 or 1; the first arm is all-low
    words  the defining relation: sets of factors, as sorted indices, whose levels have an even sum in every arm
    """

    runs: tuple[tuple[int, ...], ...]
    words: tuple[tuple[int, ...], ...]

    @property
    def resolution(self) -> float:
        """The length of the shortest word; inf of a full design."""
        return min(map(len, self.words), default=math.inf)

    def aliases(self, effect: Sequence[int], order: int = 2) -> tuple[tuple[int, ...], ...]:
        """The other effects of at most `order` factors that no arm tells apart from this one, shortest first."""
        others = (tuple(sorted(set(word) ^ set(effect))) for word in self.words)
        return tuple(sorted((other for other in others if 0 < len(other) <= order), key=lambda e: (len(e), e)))

    def effects(self) -> tuple[tuple[int, ...], ...]:
        """Every effect of one factor, then of two, without the aliases of an earlier one."""
        count, kept, named = len(self.runs[0]), [], set()
        for order in (1, 2):
            for effect in itertools.combinations(range(count), order):
                if effect not in named:
                    kept.append(effect)
                    named.update(self.aliases(effect))
        return tuple(kept)


def fraction(factors: int, resolution: int | str) -> Fraction:
    """Return the smallest regular fraction of so many factors with at least this resolution (3, 4, 5, or "full").

    UserError for fewer than two factors, for more than MOST_FACTORS, and for another resolution.
    """
    if not 2 <= factors <= MOST_FACTORS:
        raise UserError(f"factorial.factors: {factors} factors; give 2 to {MOST_FACTORS}")
    if resolution not in (3, 4, 5, FULL):
        raise UserError(f"factorial.resolution: got {resolution!r}; it takes 3, 4, 5 or full")
    least = factors if resolution == FULL else 1
    for basic in range(least, factors + 1):
        columns = [1 << place for place in range(basic)]
        if (found := _columns(columns, factors, basic, math.inf if resolution == FULL else resolution)) is not None:
            return _of_columns(found, basic)
    raise AssertionError("a full design has every resolution")


def _columns(columns: list[int], factors: int, basic: int, resolution: float) -> list[int] | None:
    """The columns as bit masks over the basic factors, any resolution - 1 of them independent; None without any."""
    if len(columns) == factors:
        return columns
    taken = _sums(columns, min(resolution, factors + 1) - 2)
    after = columns[-1] if len(columns) > basic else math.inf
    for mask in sorted(range(1, 1 << basic), key=lambda mask: (-mask.bit_count(), -mask)):
        order = (-mask.bit_count(), -mask)
        if mask in taken or (after != math.inf and order <= (-int(after).bit_count(), -after)):
            continue
        if (found := _columns([*columns, mask], factors, basic, resolution)) is not None:
            return found
    return None


def _sums(columns: Sequence[int], most: float) -> set[int]:
    """The sums of at most so many of the columns."""
    sums = set()
    for count in range(int(most) + 1):
        for some in itertools.combinations(columns, count):
            total = 0
            for column in some:
                total ^= column
            sums.add(total)
    return sums


def _of_columns(columns: Sequence[int], basic: int) -> Fraction:
    runs = tuple(tuple((arm & column).bit_count() % 2 for column in columns) for arm in range(1 << basic))
    relations = [
        (place, *(index for index in range(basic) if columns[place] >> index & 1))
        for place in range(basic, len(columns))
    ]
    words = []
    for count in range(1, len(relations) + 1):
        for some in itertools.combinations(relations, count):
            word: set[int] = set()
            for relation in some:
                word ^= set(relation)
            words.append(tuple(sorted(word)))
    return Fraction(runs=runs, words=tuple(sorted(words, key=lambda word: (len(word), word))))


SHORT = {"input": "x", "weight": "w", "grad_output": "dy", "rowwise": "row", "columnwise": "col",
         "columnwise_source": "src"}  # fmt: skip
BASELINE = "baseline"
"""The arm in which every factor is at its low level."""


class FactorialStudy(Section):
    """Arms of a fractional factorial design.

    factors: each a slot and a direction of linears ("input.rowwise"), which is `high` or `low`; or {KEY: [LOW, HIGH]},
    any key of the config with two values. resolution: 3, 4, 5 or full; the fewest arms with it are run. With 4 main
    effects are clear of two-way interactions, with 5 these are clear of each other too.
    """

    low: str = "bf16"
    high: str = "nvfp4"
    resolution: Literal[3, 4, 5, "full"] = 5
    factors: list[str | dict[str, Any]]

    @field_validator("factors")
    @classmethod
    def _two_levels(cls, factors: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        for factor in factors:
            if isinstance(factor, str):
                _slot(factor)
            elif len(factor) != 1 or not (isinstance(own := next(iter(factor.values())), list) and len(own) == 2):
                raise UserError(f"factorial.factors: got {factor!r}; it takes {{KEY: [LOW, HIGH]}}")
        return factors

    @model_validator(mode="after")
    def _apart(self) -> "FactorialStudy":
        keys = [key for key, *_ in self.levels]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise UserError(f"factorial.factors: {twice} is given twice; give it once")
        if same := next((key for key, low, high in self.levels if low == high), None):
            raise UserError(f"factorial.factors: {same} has one value at both levels; give two")
        _ = self.design
        return self

    @property
    def levels(self) -> list[tuple[str, Any, Any]]:
        """(key, low, high) of each factor."""
        return [
            (_slot(factor), self.low, self.high) if isinstance(factor, str) else (key, *factor[key])
            for factor in self.factors
            for key in ([""] if isinstance(factor, str) else factor)
        ]

    @cached_property
    def design(self) -> Fraction:
        """The arms as levels, and the effects that they do not tell apart."""
        return fraction(len(self.factors), self.resolution)

    @cached_property
    def names(self) -> list[str]:
        """The short names of the factors, such as xrow for input.rowwise."""
        parts = [key.split(".") for key, *_ in self.levels]
        short = ["".join(SHORT.get(part, part) for part in own[-2:]) if own[-1] in QUANTIZER_FIELDS else own[-1]
                 for own in parts]  # fmt: skip
        return [name if short.count(name) == 1 else f"{name}{place}" for place, name in enumerate(short)]

    @cached_property
    def arms(self) -> dict[str, dict[str, Any]]:
        """Arm -> its overrides, the baseline first. The name of another arm has the factors that are high."""
        arms = {}
        for levels in self.design.runs:
            high = [name for name, level in zip(self.names, levels, strict=True) if level]
            arms["-".join(high) or BASELINE] = {
                key: values[level] for (key, *values), level in zip(self.levels, levels, strict=True)
            }
        return arms

    def label(self, effect: tuple[int, ...]) -> str:
        """The name of an effect: "input.rowwise", or "input.rowwise x weight.rowwise"."""
        return " x ".join(self.levels[index][0].removeprefix("recipe.linear.") for index in effect)


def _slot(text: str) -> str:
    """The key of a slot and direction such as input.rowwise. UserError for anything else."""
    tensor, _, direction = text.partition(".")
    directions = QUANTIZER_FIELDS[:2]
    known = [f"{slot}.{name}" for slot in TENSOR_TYPES["linear"] for name in directions]
    if text not in known:
        raise UserError(
            f"factorial.factors: got '{text}'{nearest(text, known)}; it takes {', '.join(known)}, or"
            " {KEY: [LOW, HIGH]}"
        )
    return f"recipe.linear.{tensor}.{direction}"
