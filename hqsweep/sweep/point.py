"""GridPoint: one run of a grid, as composition gives it; Grid: all of them, and the study that they are for."""

from dataclasses import dataclass
from typing import Any

from hqsweep.config.study import StudyConfig


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One run of a grid.

    config: resolved, as plain dicts and lists. overrides: all that were given, this point's choices among them.
    changed: those of them that were swept. arm: the label of the run's recipe in this sweep, equal for all seeds.
    """

    config: dict[str, Any]
    overrides: tuple[str, ...]
    changed: tuple[str, ...]
    arm: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a sweep in the order of the grid, and the keys that belong to the sweep as a whole."""

    points: list[GridPoint]
    study: StudyConfig
