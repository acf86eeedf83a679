"""The keys of a sweep as a whole: what its arms are measured against, how far, and over which runs.

They stand beside a run's own keys in a sweep's YAML and among its overrides. No run's config has them; sweep.json keeps
them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from hqsweep.config.errors import sentence
from hqsweep.config.types import Count, Index, Name, Section
from hqsweep.errors import UserError
from hqsweep.verdicts.estimate import MAXIMUM

RESERVED = {"null", "trunk"}
STEP = re.compile(r"step_(\d+)(?:\.pt)?")
"""The names of checkpoints of runs."""
LONGEST = 44
"""The most characters of an arm's name."""


def parse_percent(value: Any, name: str) -> float:
    """A part of the baseline's loss in %, from 0.25, "0.25" or "0.25%". UserError, which begins with `name`, unless it
    is above 0 and at most 100."""
    try:
        percent = float(value.removesuffix("%")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        percent = float("nan")
    if isinstance(value, bool) or not 0 < percent <= 100:
        raise UserError(
            f"{name}: got {value!r}; it takes a part of the baseline's loss in %, above 0 and at most 100, as in 0.25%"
        )
    return percent


def parse_margin(value: Any) -> float:
    """The margin in % of the baseline's loss."""
    return parse_percent(value, "margin")


def _points(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


class SeedsConfig(Section):
    """The replicates of a study: those that are given, or, with until=decided, as many more as give every arm a
    verdict, `max` at most."""

    until: Literal["fixed", "decided"] = "fixed"
    max: Annotated[int, Field(ge=2, le=MAXIMUM)] = 16


class ForkStudy(Section):
    """A fork study. A trunk runs in the baseline's recipe at a constant learning rate, after `warmup` steps. From its
    state at each step of `at`, every arm goes on for `steps` steps at that rate and `decay` more to rate 0.

    trunk: a checkpoint of an earlier run, or the folder of that run, in the place of a new trunk; at may then be left
    out for a file. It may also be a checkpoint of another program, from which the trunks begin: the rate rises over
    `rewarm` steps, null for as many as its optimizer's state asks for, and `warmup` is not read.
    """

    at: Annotated[list[Count], BeforeValidator(_points), Field(default_factory=list)]
    steps: Count = 160
    decay: Count = 160
    warmup: Index = 30
    trunk: str | None = None
    rewarm: Index | None = None

    @field_validator("at")
    @classmethod
    def _once(cls, at: list[int]) -> list[int]:
        twice = next((step for step in at if at.count(step) > 1), None)
        if twice is not None:
            raise UserError(f"fork.at: step {twice} is given twice; every point is forked once, so give it once")
        return sorted(at)

    @model_validator(mode="after")
    def _somewhere(self) -> "ForkStudy":
        if self.trunk == "":
            raise UserError("fork.trunk: empty; give the path of a checkpoint, or null")
        if not self.at and self.file_step is None:
            raise UserError("fork.at: empty; give the steps of the trunk at which arms fork, as in fork.at=200,400")
        return self

    @property
    def file_step(self) -> int | None:
        """The step of a trunk that is a checkpoint of a run, step_N.pt or the folder step_N."""
        match = STEP.fullmatch(Path(self.trunk or "").name)
        return int(match[1]) if match and not self.is_foreign else None

    @property
    def is_foreign(self) -> bool:
        """Whether trunk is something that no run wrote: a folder without checkpoint/, or a checkpoint that lies
        elsewhere."""
        if self.trunk is None or not (path := Path(self.trunk)).exists():
            return False
        if path.is_dir() and not (STEP.fullmatch(path.name) and path.with_suffix(".json").is_file()):
            return not (path / "checkpoint").is_dir()
        return path.resolve().parent.name != "checkpoint"

    @property
    def goes_on(self) -> bool:
        """Whether the forks start from states that an earlier run has stored, and no trunk is trained."""
        return self.trunk is not None and not self.is_foreign


class StudyConfig(Section):
    """The keys of a sweep as a whole.

    arms: the name of each arm -> its overrides, as a list or as a mapping from keys to values; null: recipes and other
    swept keys make the arms.
    baseline: the arm or recipe that the others are measured against; null: bf16, else the first recipe of the grid that
    is what its name says.
    margin: the largest gap that counts as none, in % of the baseline's loss.
    """

    arms: dict[Name, list[str] | dict[str, Any]] | None = None
    null_arm: bool = False
    baseline: str | None = None
    margin: Annotated[float, BeforeValidator(parse_margin)] = 0.25
    seeds: SeedsConfig = SeedsConfig()
    fork: ForkStudy | None = None

    @field_validator("arms")
    @classmethod
    def _named(cls, arms: dict[str, Any] | None) -> dict[str, Any] | None:
        taken = next((name for name in arms or () if name in RESERVED or len(name) > LONGEST), None)
        if taken is not None:
            raise UserError(
                f"arms: '{taken}' cannot be the name of an arm; {' and '.join(sorted(RESERVED))} are taken, and a name"
                f" has at most {LONGEST} characters"
            )
        if arms is not None and not arms:
            raise UserError("arms: empty; name one at least, as in arms: {mine: {recipe: mxfp8}}, or leave it out")
        return arms


def parse_study(keys: Mapping[str, Any]) -> StudyConfig:
    """The keys of a sweep; UserError with all faults in one line."""
    try:
        return StudyConfig.model_validate(dict(keys))
    except ValidationError as error:
        raise UserError(sentence(error, StudyConfig)) from None
