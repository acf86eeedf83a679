"""The section `fork` of a run's config: whether it is a trunk or a fork of one, and how its learning rate goes."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from hqsweep.config.types import Count, Index, Section
from hqsweep.errors import UserError

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
