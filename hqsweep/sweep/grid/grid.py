"""The grid of a sweep: its points, the runs that the study of them adds, and what they are measured against."""

import json
from collections.abc import Iterable

from hqsweep.config.study import StudyConfig
from hqsweep.errors import UserError
from hqsweep.sweep.grid.fork_points import fork_points
from hqsweep.sweep.grid.null_arm import baseline_of, null_points
from hqsweep.sweep.grid.point import Grid, GridPoint, is_trunk, section


def with_study(points: list[GridPoint], study: StudyConfig) -> Grid:
    """The grid with the runs that the study adds, and the name of its baseline."""
    why = ""
    if points[0].config.get("job") == "convergence":
        baseline, why = baseline_of(points, study.baseline)
        if study.fork is not None:
            points = fork_points(points, study.fork, baseline, null_arm=study.null_arm)
        elif study.null_arm:
            points = [*points, *null_points(points, baseline)]
        study = study.model_copy(update={"baseline": study.baseline or baseline.variant})
    _check_arms([point for point in points if not is_trunk(point)])
    return Grid(points=points, study=study, baseline_why=why)


def _check_arms(points: Iterable[GridPoint]) -> None:
    """Two recipes under one name would be taken for repetitions of each other."""
    seen: dict[tuple[str, str], GridPoint] = {}  # by arm, seed and point of a fork
    for point in points:
        seed, at = point.config.get("seed"), section(point, "fork").get("at")
        twin = seen.setdefault((point.arm, json.dumps([seed, at])), point)
        if twin is not point:
            raise UserError(
                f"{' '.join(twin.changed)} and {' '.join(point.changed)} are different runs with the same recipe.name"
                f" '{point.arm}'; give each recipe a name of its own"
            )
