"""The runs of a fork study: trunks in the baseline's recipe, and every arm forked from each at every point.

Where other keys than the recipe's are swept, each of their values has trunks of its own.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hqsweep.config.fork import NULL_NOISE
from hqsweep.config.study import ForkStudy
from hqsweep.errors import UserError
from hqsweep.sweep.grid.null_arm import NAME
from hqsweep.sweep.grid.point import GridPoint, check_size, section, without

TRUNK = "trunk"
"""Arm of the trunks, and how their runs' names begin."""


def fork_points(
    points: Sequence[GridPoint], study: ForkStudy, baseline: GridPoint, *, null_arm: bool
) -> list[GridPoint]:
    """The trunks, then the forks of every point of the grid, then those of the null arm.

    The config of a fork names its trunk only when that has a name (GridPoint.trunk). UserError for a point beyond the
    trunk, and for train.steps that is no integer.
    """
    check_size(len(points) * len(study.at), "fork.at")
    recipe, trunks, forks = section(baseline, "recipe"), {}, []
    null = [replace(p, arm=NAME + p.settings) for p in points if p.variant == baseline.variant]
    for point, noise in [*((p, 0.0) for p in points), *((p, NULL_NOISE) for p in (null if null_arm else []))]:
        _check_steps(point)
        trunk = None if study.goes_on else _trunk(point, study, recipe)
        if trunk is not None:
            trunk = trunks.setdefault(json.dumps(trunk.config), trunk)
            _check_alone(trunk, trunks.values(), point)
        forks += [_fork(point, study, at, trunk, noise) for at in study.at or [study.file_step]]
    return [*trunks.values(), *forks]


def _check_alone(trunk: GridPoint, trunks: Collection[GridPoint], point: GridPoint) -> None:
    """UserError where another trunk has the same seed and settings, so that arms would not be paired."""
    place = trunk.arm, trunk.config.get("seed")
    if any(other is not trunk and (other.arm, other.config.get("seed")) == place for other in trunks):
        raise UserError(
            f"arms.{point.variant}: it changes what its trunk is trained with; the arms of a fork study go on from one"
            " trunk, so let them differ in recipe alone, and sweep other keys"
        )


def _check_steps(point: GridPoint) -> None:
    """UserError for what is no number of steps, since every run of a study has one of its own in that place."""
    steps = section(point, "train").get("steps", 0)
    if type(steps) is not int:
        raise UserError(f"train.steps: got {steps!r}; must be an integer")


def _trunk(point: GridPoint, study: ForkStudy, recipe: dict[str, Any]) -> GridPoint:
    train, last = section(point, "train"), max(study.at)
    longest = train.get("steps", last)
    if last > longest:
        raise UserError(
            f"fork.at: step {last} is beyond the trunk, which has {longest} steps (train.steps); give at most that, or"
            " more of train.steps"
        )
    fork = _section(study, trunk=None)
    unsampled = section(point, "stats") | {"every": 0}
    config = {"recipe": recipe, "train": train | {"steps": last}, "stats": unsampled, "fork": fork}
    changed = tuple(text for text in point.changed if not _key(text).startswith("recipe"))
    return replace(point, config=point.config | config, changed=changed, arm=TRUNK + point.settings)


def _section(study: ForkStudy, **changes: Any) -> dict[str, Any]:
    """The section fork of a run."""
    return study.model_dump(exclude={"rewarm"}) | changes


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _fork(point: GridPoint, study: ForkStudy, at: int, trunk: GridPoint | None, noise: float) -> GridPoint:
    fork = _section(study, at=[at], trunk=study.trunk if study.goes_on else TRUNK, noise=noise)
    config = {"train": section(point, "train") | {"steps": at + study.steps + study.decay}, "fork": fork}
    changed, overrides = (*point.changed, f"fork.at={at}"), (*without(point.overrides, "fork.at"), f"fork.at={at}")
    if noise:
        config["recipe"] = section(point, "recipe") | {"name": NAME}
        changed = (*without(point.changed, "recipe"), f"fork.noise={noise}", f"fork.at={at}")
    return replace(point, config=point.config | config, overrides=overrides, changed=changed, trunk=trunk)
