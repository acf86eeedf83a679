"""The steps of a training at which its schedule changes the recipe."""

from dataclasses import dataclass, replace

from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.sections import Faults


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A recipe without a schedule, and the first step (from 1) that it applies to."""

    first_step: int
    recipe: AnyRecipe


def stages(recipe: AnyRecipe, steps: int, start: int = 0) -> list[Stage]:
    """Return the recipes that `steps` training steps run on, in order.

    start: steps of another run that come before, which the schedule does not count.

    Raises:
        UserError: a change comes before the first or after the last update, or not after the change before it.
    """
    so_far, faults = [Stage(first_step=start + 1, recipe=replace(recipe, schedule=()))], Faults()
    for index, change in enumerate(recipe.schedule):
        done = change.at if change.at >= 1 else round(change.at * steps)
        where = f"recipe.schedule[{index}].at: {change.at} is after {done} of {steps} updates"
        if not 0 < done < steps:
            faults.texts.append(f"{where}; a change comes after at least one update and before the last")
        elif start + done < so_far[-1].first_step:
            before = so_far[-1].first_step - 1 - start
            faults.texts.append(f"{where}, but the change before it after {before}; give them in order")
        so_far.append(Stage(first_step=start + done + 1, recipe=change.recipe))
    faults.raise_any()
    return so_far
