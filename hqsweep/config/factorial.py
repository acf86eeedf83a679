"""The key `factorial` of a study: factors of two levels each, and the arms of a fraction of their combinations."""

from functools import cached_property
from typing import Any, Literal

from pydantic import field_validator, model_validator

from hqsweep.config.section import Section
from hqsweep.errors import UserError, nearest
from hqsweep.formats.spec import QUANTIZER_FIELDS
from hqsweep.recipe.roles import TENSOR_TYPES
from hqsweep.verdicts.fractions import Fraction, fraction

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
