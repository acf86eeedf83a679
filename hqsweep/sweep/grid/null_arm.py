"""The null arm of a sweep: its baseline again, with initial weights that a harmless perturbation has touched.

How far it ends from the baseline is what the experiment cannot resolve. The perturbation has the size of quantization
noise, because a smaller one (1e-5) stays on the baseline's trajectory for long and overstates the resolution.
"""

from collections.abc import Sequence
from dataclasses import replace

from hqsweep.errors import UserError, nearest
from hqsweep.sweep.grid.point import GridPoint, section, without

NULL_ARM = "null_arm"
"""The key of a sweep that asks for it."""
NAME = "null"
NOISE = 0.01
BASELINE = "bf16"


def baseline_of(points: Sequence[GridPoint], wanted: str | None) -> tuple[GridPoint, str]:
    """The first run of the baseline, and why it is that, "" of a grid of one arm: of the arm or recipe of that name,
    by default the arm called baseline, else bf16, else the first recipe that is as its name says, else the first.

    UserError for a name that the grid does not have.
    """
    if wanted is None:
        chosen, why = _usual(points)
        return chosen, why if len({point.arm for point in points}) > 1 else ""
    for name in (lambda p: p.arm, lambda p: p.variant, lambda p: section(p, "recipe").get("name")):
        chosen = next((point for point in points if name(point) == wanted), None)
        if chosen is not None:
            return chosen, "named by the key baseline"
    names = list(dict.fromkeys(point.arm for point in points))
    raise UserError(f"baseline: no arm or recipe '{wanted}'{nearest(wanted, names)}; the grid has {', '.join(names)}")


def _usual(points: Sequence[GridPoint]) -> tuple[GridPoint, str]:
    recipes = [str(section(point, "recipe").get("name")) for point in points]
    whole = [point for point in points if point.whole]
    called = next((point for point in points if point.variant == "baseline"), None)
    exact = next((p for p, name in zip(points, recipes, strict=True) if p.whole and name == BASELINE), None)
    if called is not None:
        return called, "its name says so"
    if exact is not None:
        return exact, "it is not quantized"
    if len({point.variant for point in whole}) == 1 and len(set(recipes)) == 1:
        return whole[0], "the one arm in which nothing is changed"
    return (whole or points)[0], "the first of the grid; baseline=ARM takes another"


def null_points(points: Sequence[GridPoint], baseline: GridPoint) -> list[GridPoint]:
    """The runs that null_arm=true adds: those of the baseline with model.init_noise=0.01, as recipe and arm "null".

    Where other keys than the recipe's are swept, each of their values gets a null arm of its own.
    """
    return [_perturbed(point) for point in points if point.variant == baseline.variant]


def _perturbed(point: GridPoint) -> GridPoint:
    recipe, model = section(point, "recipe"), section(point, "model")
    noise = f"model.init_noise={NOISE}"
    return replace(
        point,
        config=point.config | {"recipe": recipe | {"name": NAME}, "model": model | {"init_noise": NOISE}},
        overrides=(*without(point.overrides, NULL_ARM), f"{NULL_ARM}=false", f"recipe.name='{NAME}'", noise),
        changed=(*without(point.changed, "recipe"), noise),
        arm=NAME + point.settings,
    )
