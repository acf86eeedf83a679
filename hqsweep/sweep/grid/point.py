"""GridPoint: one run of a grid, as composition gives it; Grid: all of them, and the study that they are for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hqsweep.config.study import StudyConfig
from hqsweep.errors import UserError

LARGEST = 20_000
"""The most runs of a sweep. Its composition takes about a minute."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One run of a grid.

    config: resolved, as plain dicts and lists. overrides: all given ones, with this point's choices. changed: the swept
    ones among them. arm: the label of the run's recipe in this sweep, equal for all seeds. settings: the end of the
    label, which names swept keys outside the recipe. whole: whether the recipe is unchanged. trunk: for a fork, its run
    of the same grid.
    """

    config: dict[str, Any]
    overrides: tuple[str, ...]
    changed: tuple[str, ...]
    arm: str
    settings: str = ""
    whole: bool = True
    trunk: "GridPoint | None" = None

    @property
    def variant(self) -> str:
        """The arm without its settings. Arms of other variants at the same settings are paired by it."""
        return self.arm.removesuffix(self.settings)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a sweep in the order of the grid, the keys of the sweep as a whole, and the reason for its baseline.

    The reason is "" without a comparison.
    """

    points: list[GridPoint]
    study: StudyConfig
    baseline_why: str = ""


def check_size(count: int, what: str) -> None:
    """UserError, before anything is composed, for more runs than a sweep can have."""
    if count > LARGEST:
        raise UserError(
            f"{what}: {count:,} runs at least, and a sweep has at most {LARGEST:,}; give fewer values, or split them"
            " into sweeps with names of their own (sweep=NAME)"
        )


def section(point: GridPoint, key: str) -> dict[str, Any]:
    """A section of an unchecked config; {} where it is missing."""
    section = point.config.get(key)
    return section if isinstance(section, dict) else {}


def is_trunk(point: GridPoint) -> bool:
    """Whether the run is a trunk of a fork study, and so of no arm."""
    fork = section(point, "fork")
    return bool(fork) and fork.get("trunk") is None


def without(overrides: Sequence[str], key: str) -> list[str]:
    """The overrides of all other keys."""
    return [text for text in overrides if text.lstrip("+").partition("=")[0] != key]
