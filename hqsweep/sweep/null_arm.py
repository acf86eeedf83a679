"""The null arm of a sweep: its baseline again, with initial weights that a harmless perturbation has touched.

How far it ends from the baseline is what the experiment cannot resolve. The perturbation has the size of quantization
noise, because a smaller one (1e-5) stays on the baseline's trajectory for long and overstates the resolution.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hqsweep.errors import UserError
from hqsweep.sweep.point import GridPoint

NULL_ARM = "null_arm"
"""The switch in a sweep's YAML and among its overrides. It is no part of a run's config."""
NAME = "null"
NOISE = 0.01
BASELINE = "bf16"


def null_points(points: Sequence[GridPoint], wanted: Any) -> list[GridPoint]:
    """The runs that null_arm=true adds: those of the baseline with model.init_noise=0.01, as recipe and arm "null".

    The baseline is bf16, or else the recipe of the first point; where other keys are swept, each of their values gets
    a null arm of its own. UserError when `wanted` is not true or false.
    """
    if not isinstance(wanted, bool):
        raise UserError(f"{NULL_ARM}: got {wanted!r}; it takes true or false")
    if not wanted:
        return []
    recipes = [_section(point, "recipe") for point in points]
    baseline = next((recipe for recipe in recipes if recipe.get("name") == BASELINE), recipes[0])
    return [_perturbed(point) for point in points if _section(point, "recipe") == baseline]


def _perturbed(point: GridPoint) -> GridPoint:
    recipe, model = _section(point, "recipe"), _section(point, "model")
    noise = f"model.init_noise={NOISE}"
    return replace(
        point,
        config=point.config | {"recipe": recipe | {"name": NAME}, "model": model | {"init_noise": NOISE}},
        overrides=(*_without(point.overrides, NULL_ARM), f"{NULL_ARM}=false", f"recipe.name='{NAME}'", noise),
        changed=(*_without(point.changed, "recipe"), noise),
        arm=NAME + point.arm.removeprefix(str(recipe.get("name"))),
    )


def _without(overrides: Sequence[str], key: str) -> list[str]:
    return [text for text in overrides if text.lstrip("+").partition("=")[0] != key]


def _section(point: GridPoint, key: str) -> dict[str, Any]:
    """A section of a config that nothing has checked yet."""
    section = point.config.get(key)
    return section if isinstance(section, dict) else {}
