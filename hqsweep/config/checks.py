"""Sections of the config for the jobs that check arithmetic: parity to the byte, calibrate against theory."""

import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hqsweep.config.types import Count, Device, Section
from hqsweep.errors import UserError, nearest
from hqsweep.formats.inputs import DISTRIBUTIONS, check_format
from hqsweep.recipe.sections import LinearQuantizers

Shape = Annotated[list[Count], Field(min_length=2, max_length=2)]
"""[rows, columns]."""
Names = Annotated[list[str], Field(min_length=1)]
PARITY_CHECKS = (
    "kernel", "statistics", "vanilla", "routing", "pairs", "causality", "grouped", "modules", "switch", "export",
    "repeat", "resume", "weights", "recompute", "offload",
)  # fmt: skip
"""Names of the checks of the parity job, whose functions are in jobs/parity."""
CALIBRATE_DISTRIBUTIONS = ("normal", "laplace", "t5", "t3", "outlier_channels", "token_scale_2", "token_scale_4")
"""Names of the distributions of the calibrate job, whose functions are in jobs/calibrate/sqnr.py."""


class ParitySection(Section):
    """Formats, distributions and shapes that are compared to the byte, and the checks that compare them. ranks: in how
    many processes on this machine, 2 or 4 or both as [2,4], what several ranks compute together is compared with one
    process."""

    formats: Names
    distributions: Names
    shapes: Annotated[list[Shape], Field(min_length=1)]
    checks: Names
    device: Device = "auto"
    ranks: list[Literal[2, 4]] = Field(default_factory=list)

    @field_validator("ranks", mode="before")
    @classmethod
    def _one_or_many(cls, ranks: Any) -> Any:
        return [ranks] if type(ranks) is int else ranks

    @model_validator(mode="after")
    def _known(self) -> "ParitySection":
        for key, known in (("distributions", DISTRIBUTIONS), ("checks", PARITY_CHECKS)):
            for name in getattr(self, key):
                _check_known(f"parity.{key}", name, known)
        for text, shape in itertools.product(self.formats, self.shapes):
            check_format(text, shape, "parity")
        return self


class CalibrateSection(Section):
    """Formats and distributions of the SQNR tables, whose matrices have `shape`; students are linear sections of a
    recipe by name, each trained for `steps`."""

    formats: Names
    distributions: Names
    shape: Shape
    students: dict[str, Any]
    steps: Count = 1500
    device: Device = "auto"

    @field_validator("students")
    @classmethod
    def _sections(cls, students: dict[str, Any]) -> dict[str, dict[str, str]]:
        """Canonical text of each section. Delayed scaling is refused: no scale outlives a step here."""
        sections = {
            name: LinearQuantizers.parse(value, f"calibrate.students.{name}") for name, value in students.items()
        }
        for name, section in sections.items():
            if any(q.delayed for q in (section.input, section.weight, section.grad_output)):
                raise UserError(f"calibrate.students.{name}: fp8_delayed has no error of its own; give fp8_current")
        return {name: section.texts() for name, section in sections.items()}

    @model_validator(mode="after")
    def _known(self) -> "CalibrateSection":
        for name in self.distributions:
            _check_known("calibrate.distributions", name, CALIBRATE_DISTRIBUTIONS)
        for text in self.formats:
            check_format(text, self.shape, "calibrate")
        return self


def _check_known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise UserError(f"{where}: got '{name}'{nearest(name, known)}; known are {', '.join(known)}")
