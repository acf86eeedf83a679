"""Check every GEMM of a model against a recipe, in every stage of its schedule, before any module is built."""

from collections.abc import Iterator, Sequence

from hqsweep.errors import UserError
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import DeviceFault, GemmModule, counted, gemm_faults
from hqsweep.recipe.sectioned import unread_overrides
from hqsweep.recipe.stages import stages


def validate(
    recipe: AnyRecipe, steps: int, modules: Sequence[GemmModule], device_fault: DeviceFault | None = None
) -> None:
    """Check every GEMM of a model in every stage of the recipe; each slot is resolved once per stage.

    device_fault: asked under gemm=native; None if the device is not known yet.

    Raises:
        UserError: all faults in one sentence: GEMMs whose operands cannot meet or do not fit their blocks, with module,
            slots, directions and formats; overrides without a module. Later stages report only new faults.
    """
    first_step: dict[str, int] = {}
    for stage in stages(recipe, steps):
        for text in recipe_faults(stage.recipe, modules, device_fault):
            first_step.setdefault(text, stage.first_step)
    if first_step:
        texts = [text + (f" (from step {step} on)" if step > 1 else "") for text, step in first_step.items()]
        raise UserError("recipe: " + "; ".join(texts))


def recipe_faults(
    recipe: AnyRecipe, modules: Sequence[GemmModule], device_fault: DeviceFault | None = None
) -> Iterator[str]:
    """Yield the faults of a recipe, without its schedule, for these modules, as validate() reports them."""
    roles = [role for module in modules for role in module.roles]
    yield from unread_overrides(recipe, roles)
    quantizers = recipe.resolve(roles)
    yield from counted(
        (module.name, text) for module in modules for text in gemm_faults(module, quantizers, recipe.gemm, device_fault)
    )


def check_held_weights(recipe: AnyRecipe, steps: int, modules: Sequence[GemmModule]) -> None:
    """Raise UserError if a schedule would change the format of a module's quantized weight, or if that format draws the
    signs of its transform, which change from step to step."""
    roles = [role for module in modules for role in module.roles if role.tensor_type == "weight"]
    first, *later = stages(recipe, steps)
    held = first.recipe.resolve(roles)
    for role, quantizer in held.items():
        if quantizer.rowwise.rht_drawn or quantizer.columnwise.rht_drawn:
            raise UserError(
                f"recipe: model.quantized_weights holds {role} in {quantizer}, and +eden draws new signs in every step;"
                " set model.quantized_weights=false, or give the weight +sr in place of +eden"
            )
    for stage in later:
        for role, quantizer in stage.recipe.resolve(roles).items():
            if quantizer != held[role]:
                raise UserError(
                    f"recipe.schedule: from step {stage.first_step} on {role} is {quantizer}, but"
                    f" model.quantized_weights holds it in {held[role]}; leave weights as they are, or set"
                    " model.quantized_weights=false"
                )
