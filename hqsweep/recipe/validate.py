"""Checks of a recipe before any module is built: every GEMM of a model, in every stage of the schedule, and its cuts.

Ranks of train.parallel.tp share matrices. A recipe and a model's sizes suffice to know the axis of each cut, and blocks
that a cut would split, before anything runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from hqsweep.errors import UserError
from hqsweep.parallel.shards.shard_part import CUTS, Mode, Part, cut_block
from hqsweep.quant.hybrid import HybridQuantizer, ProjectedQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import NATIVE_MODULES, DeviceFault, GemmModule, counted, gemm_faults
from hqsweep.recipe.roles import HEAD
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
                " set model.quantized_weights=false, or give all operands +sr in place of +eden"
            )
    for stage in later:
        for role, quantizer in stage.recipe.resolve(roles).items():
            if quantizer != held[role]:
                raise UserError(
                    f"recipe.schedule: from step {stage.first_step} on {role} is {quantizer}, but"
                    f" model.quantized_weights holds it in {held[role]}; leave weights as they are, or set"
                    " model.quantized_weights=false"
                )


SHARED: Mapping[str, tuple[Mode, int]] = MappingProxyType(
    {"qkv": ("column", 3), "proj": ("row", 1), "fc1": ("column", 2), "fc2": ("row", 1), HEAD: ("column", 1)}
)
"""Last name of a GPT's linear -> (how ranks share it, the matrices in its weight, each of which is cut)."""


def check_parts(recipe: AnyRecipe, steps: int, modules: Sequence[GemmModule], ranks: int) -> None:
    """Raise UserError for the first part of a matrix that splits a block of its format, in any stage of the recipe."""
    for stage in stages(recipe, steps):
        fault = next(_faults(stage.recipe, modules, ranks), None)
        if fault:
            raise UserError(f"train.parallel.tp: {fault}")


def _faults(recipe: AnyRecipe, modules: Sequence[GemmModule], ranks: int) -> Iterator[str]:
    shared = [module for module in modules if module.module_type in NATIVE_MODULES]
    quantizers = recipe.resolve([role for module in shared for role in module.roles])
    for module in shared:
        last = module.name.rpartition(".")[2]
        mode, pieces = SHARED[last]
        tokens, features_out, features_in = module.shapes["fprop"]
        shapes = {"input": (tokens, features_in), "weight": (features_out, features_in)}
        shapes["grad_output"] = (tokens, features_out)
        for role in module.roles:
            axis, quantizer = CUTS[mode].get(role.tensor_type), quantizers[role]
            if axis is not None and isinstance(quantizer, ProjectedQuantizer):
                yield f"{module.name} has the weight {quantizer}, and ranks share no projected weight; give one rank"
            if axis is None or type(quantizer) is not HybridQuantizer:
                continue
            own = [size // ranks if i == axis else size for i, size in enumerate(shapes[role.tensor_type])]
            cut = cut_block(quantizer, own, Part(group=None, axis=axis, runs=pieces), "codes", "codes")
            if cut:
                yield _sentence(module, role.tensor_type, own[axis] // pieces, ranks, *cut)


def _sentence(module: GemmModule, tensor: str, size: int, ranks: int, format: object, block: int) -> str:
    multiple, key = block * ranks, _key(module)
    such = "" if key is None else f", such as {key}={-(-size * ranks // multiple) * multiple},"
    return (
        f"{ranks} ranks have {size} features each of {module.name}, which cut blocks of {block} of its {tensor},"
        f" {format}; give a multiple of {multiple}{such} or fewer ranks"
    )


def _key(module: GemmModule) -> str | None:
    """Return the config key of the width that ranks share; None for the vocabulary, which the data sets."""
    if module.name == HEAD:
        return None
    if module.name.rpartition(".")[2] not in ("fc1", "fc2"):
        return "model.dim"
    of_expert = module.module_type == "grouped_linear" or ".shared." in module.name
    return "model.expert_ffn" if of_expert else "model.ffn"
