"""Matrices that the ranks of train.parallel.tp share: the axis of each cut, and blocks that a cut would split.

A recipe and a model's sizes suffice to know them before anything runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from hqsweep.errors import UserError
from hqsweep.parallel.shards.shard_part import CUTS, Mode, Part, cut_block
from hqsweep.quant.hybrid import HybridQuantizer, ProjectedQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import NATIVE_MODULES, GemmModule
from hqsweep.recipe.roles import HEAD
from hqsweep.recipe.stages import stages

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
