"""Keys of a sweep as a whole, which the study is about and over which runs, and the section `fork` of its runs.

The keys of a study stand beside a run's own keys in a sweep's YAML and among its overrides. No run's config has them;
sweep.json keeps them. The section `fork` says whether a run is a trunk or a fork, and how its learning rate goes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from hqsweep.config.factorial import FactorialStudy
from hqsweep.config.section import Count, Index, Name, Section, sentence
from hqsweep.errors import UserError
from hqsweep.verdicts.estimate import MAXIMUM

NULL_NOISE = 0.01
"""Noise of the null arm's forks: of the size of quantization noise."""

LOOKS = 10
"""Evaluations between a foreign checkpoint and the first fork of the trunk that begins from it."""


class ForkConfig(Section):
    """A run of a fork study.

    Without `trunk` the run is a trunk: it rises to train.lr over `warmup` steps, stays there, and keeps its whole state
    at each step of `at`. With it the run is a fork of the run of that name in the same sweep, or of a checkpoint file:
    it starts from the state at the one step of `at`, and goes on for `steps` steps at train.lr and `decay` more, over
    which the rate falls linearly to 0. trunk_hash: sha256 of a checkpoint file. noise: every weight is multiplied by
    1 + noise * N(0, 1) at the fork. source: a checkpoint of another program, from which a trunk begins instead of
    random weights, and source_hash: its sha256.
    """

    at: Annotated[list[Count], Field(min_length=1)]
    steps: Count
    decay: Count
    warmup: Index
    trunk: str | None = None
    trunk_hash: str | None = None
    noise: Annotated[float, Field(ge=0)] = 0.0
    source: str | None = None
    source_hash: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "ForkConfig":
        if self.trunk is not None and len(self.at) > 1:
            raise UserError(f"fork.at: a fork starts at one step, and got {self.at}; give one")
        if self.trunk is None and (self.trunk_hash or self.noise):
            raise UserError("fork.trunk: missing, but fork.trunk_hash or fork.noise is given, which a trunk has not")
        if self.trunk is not None and (self.source or self.source_hash):
            raise UserError("fork.source: given to a fork, which starts from its trunk; only a trunk has one")
        return self

    @property
    def is_trunk(self) -> bool:
        return self.trunk is None

    @property
    def trunk_name(self) -> str | None:
        """The name of the run that the run is a fork of; None for a trunk."""
        return self.trunk if self.is_trunk or self.trunk_hash is None else Path(self.trunk).parent.parent.name

    @property
    def start(self) -> int:
        """The step from which the run goes on; 0 for a trunk."""
        return 0 if self.is_trunk else self.at[0]

    @property
    def constant_end(self) -> int | None:
        """The last step of a fork at the constant rate; None for a trunk."""
        return None if self.is_trunk else self.at[0] + self.steps

    @property
    def last(self) -> int:
        """The last step."""
        return max(self.at) if self.is_trunk else self.at[0] + self.steps + self.decay

    def looks_at(self, step: int) -> bool:
        """Whether a trunk that begins from a foreign checkpoint is evaluated at a step before its first point."""
        return self.source is not None and step < min(self.at) and step % max(1, min(self.at) // LOOKS) == 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1, as a part of train.lr."""
        rise = min(1.0, step / self.warmup) if self.warmup else 1.0
        return rise if self.is_trunk else rise * min(1.0, (self.last - step + 1) / self.decay)

    def state_path(self, folder: Path, ranks: int = 1) -> Path | None:
        """The checkpoint that the fork in this run's folder starts from: a file, or the folder that several ranks have
        written; None for a trunk."""
        if self.is_trunk:
            return None
        if self.trunk_hash is not None:
            return Path(self.trunk)
        name = f"step_{self.start}.pt" if ranks == 1 else f"step_{self.start}"
        return folder.parent / self.trunk / "checkpoint" / name


RESERVED = {"null", "trunk"}
STEP = re.compile(r"step_(\d+)(?:\.pt)?")
"""The names of checkpoints of runs."""
LONGEST = 44
"""The most characters of an arm's name."""


def parse_percent(value: Any, name: str, came: Any = None) -> float:
    """A part of the baseline's loss in %, from 0.25, "0.25" or "0.25%". UserError, which begins with `name`, unless it
    is above 0 and at most 100. `came`: the whole of what was given, where `value` is a part of it."""
    try:
        percent = float(value.removesuffix("%")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        percent = float("nan")
    if isinstance(value, bool) or not 0 < percent <= 100:
        given = value if came is None else came
        raise UserError(
            f"{name}: got {given!r}; it takes a part of the baseline's loss in %, above 0 and at most 100, as in 0.25%"
            + (", or of the tokens, as in 1%tokens" if name == "margin" else "")
        )
    return percent


TOKENS = re.compile(r"\s*(.+?)\s*%?\s*(?:of the )?tokens\s*")
"""A margin in tokens."""


def parse_margin(value: Any) -> float | str:
    """The margin: a float in % of the baseline's loss (0.25, "0.25%"), or "1% tokens", % more tokens for the same loss
    (also "1%tokens"). UserError for another value."""
    match = TOKENS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_percent(value, "margin")
    return f"{parse_percent(match[1], 'margin', value):g}% tokens"


def margin_in_tokens(margin: float | str) -> float:
    """The % of tokens of a margin that parse_margin gave; NaN where it is a part of the loss."""
    return float(margin.partition("%")[0]) if isinstance(margin, str) else float("nan")


def _points(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


class SeedsConfig(Section):
    """The replicates of a study: those that are given, or, with until=decided, as many more as give every arm a
    verdict, `max` at most."""

    until: Literal["fixed", "decided"] = "fixed"
    max: Annotated[int, Field(ge=2, le=MAXIMUM)] = 16


FORK_STEPS = 160


class ForkStudy(Section):
    """A fork study. A trunk runs in the baseline's recipe at a constant learning rate, after `warmup` steps. From its
    state at each step of `at`, every arm goes on for `steps` steps (160) at that rate and `decay` more to rate 0.

    end: the step at which every fork ends, in the place of `steps`: a fork from the step a then has end - decay - a
    steps at that rate. All forks are judged after the same tokens then, at several ages, and how the gap grows with age
    gives the gap of a whole run of `end` steps (verdicts.judging).
    until: fixed, or settled: trunks are added with their forks until the interval of every arm's gap of a whole run
    reaches no further than the margin to either side, or no more of them fit into `max_steps` steps in all.
    trunk: a checkpoint of an earlier run, or the folder of that run, in the place of a new trunk; at may then be left
    out for a file. It may also be a checkpoint of another program, from which the trunks begin: the rate rises over
    `rewarm` steps, null for as many as its optimizer's state asks for, and `warmup` is not read.
    """

    at: Annotated[list[Count], BeforeValidator(_points), Field(default_factory=list)]
    steps: Count | None = None
    end: Count | None = None
    until: Literal["fixed", "settled"] = "fixed"
    max_steps: Count | None = None
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
        if self.end is not None and self.steps is not None:
            raise UserError(
                f"fork.steps: {self.steps} steps for each fork, but all forks end together (fork.end={self.end}); leave"
                " one of them out, or give it null"
            )
        last = max(self.at, default=self.file_step)
        if self.end is not None and self.end - self.decay <= last:
            raise UserError(
                f"fork.end: step {self.end} with fork.decay={self.decay} leaves a fork from step {last} no step at the"
                f" constant rate; give {last + self.decay + 1} or more, or earlier points (fork.at)"
            )
        return self

    @model_validator(mode="after")
    def _settles(self) -> "ForkStudy":
        if self.until == "fixed" and self.max_steps is None:
            return self
        if self.until == "fixed":
            raise UserError(
                f"fork.max_steps: {self.max_steps} steps, but fork.until=fixed trains the seeds that are given; give"
                " fork.until=settled, or leave fork.max_steps out"
            )
        if self.end is None:
            raise UserError(
                "fork.until: settled, but forks that do not end together give no gap of a whole run; give fork.end=STEP"
                " and two points in fork.at, or fork.until=fixed"
            )
        if len(self.at) < 2:
            raise UserError(
                f"fork.until: settled, but forks of one age give no gap of a whole run, and fork.at has {self.at}; give"
                " two points or more"
            )
        if self.max_steps is None:
            raise UserError(
                "fork.max_steps: missing; fork.until=settled adds trunks with their forks, so give the most steps that"
                " they may take in all"
            )
        if self.max_steps < self.end:
            raise UserError(
                f"fork.max_steps: {self.max_steps} steps for the whole study, but one run to fork.end={self.end} takes"
                " more; give the steps of three trunks with their forks at least"
            )
        return self

    def steps_from(self, at: int) -> int:
        """The steps at the constant rate of a fork from the step `at`."""
        return self.end - self.decay - at if self.end is not None else self.steps or FORK_STEPS

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
    margin: the largest gap that counts as none, in % of the baseline's loss, or as "1% tokens": the most tokens more
    for the same loss that count as none.
    factorial: factors of two levels each, whose combinations make the arms (conf=factorial has its keys).
    """

    arms: dict[Name, list[str] | dict[str, Any]] | None = None
    null_arm: bool = False
    baseline: str | None = None
    margin: Annotated[float | str, BeforeValidator(parse_margin)] = 0.25
    seeds: SeedsConfig = SeedsConfig()
    fork: ForkStudy | None = None
    factorial: FactorialStudy | None = None

    @property
    def settles(self) -> bool:
        """Whether the study goes on until every gap is known to the margin."""
        return self.fork is not None and self.fork.until == "settled"

    @property
    def maximum(self) -> int | None:
        """The most replicates of a study that is looked at after each; None for a study of a fixed size."""
        return self.seeds.max if self.settles or self.seeds.until == "decided" else None

    @model_validator(mode="after")
    def _one_source_of_arms(self) -> "StudyConfig":
        if self.arms is not None and self.factorial is not None:
            raise UserError("arms: given beside factorial, whose design makes the arms; leave one of them out")
        return self

    @model_validator(mode="after")
    def _one_rule(self) -> "StudyConfig":
        if self.settles and self.seeds.until == "decided":
            raise UserError(
                "fork.until: settled, beside seeds.until=decided, and a study ends by one rule; leave one of them out"
            )
        return self

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
