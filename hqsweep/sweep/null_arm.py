"""The null arm of a sweep: its baseline again, with initial weights that a harmless perturbation has touched.

How far it ends from the baseline is what the experiment cannot resolve. The perturbation has the size of quantization
noise, because a smaller one (1e-5) stays on the baseline's trajectory for long and overstates the resolution.
"""

from collections.abc import Sequence
from dataclasses import replace

from hqsweep.errors import UserError, nearest
from hqsweep.sweep.point import GridPoint, section, without

NULL_ARM = "null_arm"
"""The key of a sweep that asks for it."""
NAME = "null"
NOISE = 0.01
BASELINE = "bf16"


def baseline_of(points: Sequence[GridPoint], wanted: str | None) -> GridPoint:
    """The first run of the baseline: of the arm or recipe of that name, by default bf16, or else of the first recipe.

    UserError for a name that the grid does not have.
    """
    if wanted is None:
        return next((point for point in points if section(point, "recipe").get("name") == BASELINE), points[0])
    for point in points:
        if wanted in (point.arm, section(point, "recipe").get("name")):
            return point
    names = list(dict.fromkeys(point.arm for point in points))
    raise UserError(f"baseline: no arm or recipe '{wanted}'{nearest(wanted, names)}; the grid has {', '.join(names)}")


def null_points(points: Sequence[GridPoint], baseline: GridPoint) -> list[GridPoint]:
    """The runs that null_arm=true adds: those of the baseline with model.init_noise=0.01, as recipe and arm "null".

    Where other keys than the recipe's are swept, each of their values gets a null arm of its own.
    """
    recipe = section(baseline, "recipe")
    return [_perturbed(point) for point in points if section(point, "recipe") == recipe]


def _perturbed(point: GridPoint) -> GridPoint:
    recipe, model = section(point, "recipe"), section(point, "model")
    noise = f"model.init_noise={NOISE}"
    return replace(
        point,
        config=point.config | {"recipe": recipe | {"name": NAME}, "model": model | {"init_noise": NOISE}},
        overrides=(*without(point.overrides, NULL_ARM), f"{NULL_ARM}=false", f"recipe.name='{NAME}'", noise),
        changed=(*without(point.changed, "recipe"), noise),
        arm=NAME + point.arm.removeprefix(str(recipe.get("name"))),
    )
