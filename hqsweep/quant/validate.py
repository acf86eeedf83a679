"""Checks a recipe against the modules of a model before one of them is built: every GEMM of every module."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hqsweep.errors import UserError, nearest
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.pairs import MODULE_GEMMS, hardware_fault, mathematical_fault
from hqsweep.quant.recipe import Recipe
from hqsweep.quant.roles import QuantizerRole, module_roles
from hqsweep.quant.schedule import AnyRecipe
from hqsweep.quant.select import layers_of


@dataclass(frozen=True, kw_only=True)
class GemmModule:
    """A module with matrix products."""

    module_type: str
    name: str
    contracted: Mapping[str, int]
    """GEMM -> how many elements it contracts."""
    context: int | None = None
    """Of attention, the number of tokens, which its other GEMMs contract."""

    @property
    def roles(self) -> list[QuantizerRole]:
        return module_roles(self.module_type, self.name)


def linear_module(name: str, in_features: int, out_features: int, tokens: int) -> GemmModule:
    """A linear; tokens: rows of its input in a training step."""
    contracted = {"fprop": in_features, "dgrad": out_features, "wgrad": tokens}
    return GemmModule(module_type="linear", name=name, contracted=contracted)


def attention_module(name: str, head_dim: int, context: int) -> GemmModule:
    """Dot-product attention over `context` tokens."""
    contracted = {"qk": head_dim, "ds": head_dim}
    return GemmModule(module_type="dpa", name=name, contracted=contracted, context=context)


def attention_faults(quantizers: Mapping[str, HybridQuantizer], context: int) -> Iterator[str]:
    """Why attention over `context` tokens cannot take a quantizer: tensor -> quantizer of its four slots.

    Matrices of all heads are folded into rows, so that blocks along tokens must end with each matrix.
    """
    for tensor, quantizer in quantizers.items():
        if getattr(quantizer.rowwise, "row_scaled", False):
            yield f"{tensor} {quantizer.rowwise}: attention takes one global amax a tensor"
        for direction, format in (("rowwise", quantizer.rowwise), ("columnwise", quantizer.columnwise)):
            tile = getattr(format, "tile", (1, 1))
            along = max(tile) if direction == "columnwise" or tensor in ("s", "dp") else tile[0]
            if along > 1 and context % along:
                takes = f"its blocks take a multiple of {along}"
                yield f"{tensor} {direction} {format}: the context has {context} positions; {takes}"


def validate(recipe: AnyRecipe, modules: Sequence[GemmModule]) -> None:
    """Check every GEMM of a model on the recipe (the schedule is not looked at); each slot is resolved once.

    Raises:
        UserError: all faults in one sentence: GEMMs whose operands cannot meet or do not fit their blocks, with the
            module, the slots, directions and formats of both; overrides without a module.
    """
    texts = list(_unread(recipe, modules)) if isinstance(recipe, Recipe) else []
    quantizers = recipe.resolve(role for module in modules for role in module.roles)
    faults = [(module.name, text) for module in modules for text in _faults(module, quantizers, recipe.gemm)]
    count = Counter(text for _, text in faults)
    first = {text: name for name, text in reversed(faults)}
    texts += [f"{first[t]} {t}" + (f" (and in {n - 1} more)" if n > 1 else "") for t, n in count.items()]
    if texts:
        raise UserError("recipe: " + "; ".join(texts))


def _faults(module: GemmModule, quantizers: Mapping[QuantizerRole, HybridQuantizer], gemm_mode: str) -> Iterator[str]:
    if module.context is not None:
        yield from attention_faults({role.tensor_type: quantizers[role] for role in module.roles}, module.context)
    for gemm, operands in MODULE_GEMMS[module.module_type].items():
        size = module.contracted.get(gemm, 0)
        formats = [
            getattr(quantizers[QuantizerRole(module.module_type, tensor, module.name)], direction)
            for tensor, direction in operands
        ]
        spelled = [f"{t} {d} {f}" for (t, d), f in zip(operands, formats, strict=True)]
        misfits = {s: f.column_multiple for s, f in zip(spelled, formats, strict=True) if size % f.column_multiple}
        if misfits:
            takers = " and ".join(f"{s} takes a multiple of {m}" for s, m in misfits.items())
            yield f"{gemm}: the contracted axis has {size} elements, but {takers}"
        fault = mathematical_fault(*formats)
        strict = "" if fault or gemm_mode != "strict" else " under gemm=strict"
        fault = fault or (hardware_fault(*formats) if strict else None)
        if fault:
            yield f"{gemm}: {spelled[0]} cannot meet {spelled[1]}{strict}: {fault}"


def _unread(recipe: Recipe, modules: Sequence[GemmModule]) -> Iterator[str]:
    """What the recipe says and no module would follow, so that nobody takes high precision for something else."""
    names = [module.name for module in modules]
    roles = [role for module in modules for role in module.roles]
    layers = layers_of(roles)
    for index, override in enumerate(recipe.overrides):
        where = f"overrides[{index}] ({override})"
        if not any(getattr(override, role.module_type) and override.matches(role, layers) for role in roles):
            named = any(fnmatchcase(name, override.name) for name in names)
            hint = f"; the model has layers {layers[0]} to {layers[-1]}" if named and layers else ""
            hint = hint or f"{nearest(override.name, names)}; the model has {names[0]} to {names[-1]}"
            yield f"{where} matches no module{hint}"
