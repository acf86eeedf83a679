"""The effect of a recipe on a model's modules: whether it quantizes anything, and whether two recipes act alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hqsweep.quant.hybrid import HybridQuantizer, is_low
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.listing import PARTS
from hqsweep.recipe.products import GemmModule
from hqsweep.recipe.roles import HEAD, QuantizerRole
from hqsweep.recipe.sections import Section, slots
from hqsweep.recipe.stages import stages

TABLES = tuple(GemmModule(module_type=kind, name=kind, shapes={}) for kind in ("embedding", "norm"))
"""Modules of hqsweep's GPT with a quantized weight but no product; all norms are alike."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A recipe on a model's modules. Equal values compute the same.

    stages: (updates before it, operands) for each change. operands: the formats of every module, the GEMM mode if a
    module is quantized, and the exchange of gradients if there is one.
    """

    stages: tuple[tuple[int, frozenset[Any]], ...]
    quantizes: bool
    """Whether a slot is in low precision at any step."""


def applied(recipe: AnyRecipe, steps: int, modules: Sequence[GemmModule]) -> Applied:
    """Return the recipe's effect on these modules over `steps` updates. UserError as for stages() and
    recipe.resolve()."""
    changes: list[tuple[int, frozenset[Any]]] = []
    low = False
    for stage in stages(recipe, steps):
        quantizers = stage.recipe.resolve(role for module in modules for role in module.roles)
        formats = [(module, _formats(module, quantizers)) for module in modules]
        operands = {(module.module_type, module.name, own) for module, own in formats if own is not None}
        if any(map(is_low, quantizers.values())):
            low = True
            operands.add(("native" if stage.recipe.gemm == "native" else "exact",))
        if comm := getattr(stage.recipe, "comm", None):
            operands.add(("comm", comm))
        if not changes or changes[-1][1] != operands:
            changes.append((stage.first_step - 1, frozenset(operands)))
    return Applied(stages=tuple(changes), quantizes=low)


def _formats(module: GemmModule, quantizers: Mapping[QuantizerRole, HybridQuantizer]) -> Any:
    """Return a module's quantizers as far as they affect numbers; None for attention in high precision, which is
    torch's."""
    own = [quantizers[role] for role in module.roles]
    if module.module_type == "dpa" and not any(map(is_low, own)):
        return None
    return tuple((q.rowwise, q.columnwise) if q.rowwise == q.columnwise and not is_low(q) else q for q in own)


def asks(recipe: AnyRecipe) -> list[str]:
    """Return the low-precision sections of a recipe, its schedule and overrides: PARTS, "overrides", or "qfactory"."""
    every = [recipe, *(change.recipe for change in recipe.schedule)]
    return list(dict.fromkeys(part for one in every for part in _asked(one)))


def _asked(recipe: AnyRecipe) -> Iterator[str]:
    if isinstance(recipe, CustomRecipe):
        yield "qfactory"
        return
    for part in PARTS:
        section = getattr(recipe, part)
        follows = part == "grouped_linear" and section == recipe.linear
        if not follows and _is_low_section(section):
            yield part
    sections = (s for o in recipe.overrides for s in (o.linear, o.grouped_linear, o.dpa) if s is not None)
    if any(map(_is_low_section, sections)):
        yield "overrides"


def _is_low_section(section: Section | HybridQuantizer) -> bool:
    own = [section] if isinstance(section, HybridQuantizer) else slots(section).values()
    return any(quantizer is not None and is_low(quantizer) for quantizer in own)


def why_nothing(recipe: AnyRecipe, modules: Sequence[GemmModule]) -> str:
    """Return a clause that explains why a low-precision recipe quantizes none of these modules."""
    asked, taken = asks(recipe), [module for module in modules if module not in TABLES]
    if asked == ["qfactory"]:
        return f"its qfactory gives high precision for {_counted(taken)}"
    kinds = {part: [m for m in taken if _part_of(m) == part] for part in PARTS}
    unmet = [f"recipe.{part}" for part in asked if part in PARTS and not kinds[part]]
    undone = [module for part in asked for module in kinds.get(part, ())]
    clauses = [f"{' and '.join(unmet)} {'meets' if len(unmet) == 1 else 'meet'} no module here"] if unmet else []
    clauses += [f"recipe.overrides take back {_counted(undone)}"] if undone else []
    if not undone:
        parts = " and ".join(f"recipe.{part}" for part, modules in kinds.items() if modules)
        clauses.append(f"{_counted(taken)} {'take' if len(taken) > 1 else 'takes'} {parts}, in high precision")
    return ", and ".join(clauses)


def _part_of(module: GemmModule) -> str:
    return "head" if module.module_type == "linear" and module.name == HEAD else module.module_type


def _counted(modules: Sequence[GemmModule]) -> str:
    """Return "head" or "all 13 modules": the only name, or the number."""
    return modules[0].name if len(modules) == 1 else f"all {len(modules)} modules"
