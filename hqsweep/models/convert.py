"""convert: the modules of a user's model compute by a recipe from then on; revert undoes it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.attention import AttentionKind
from hqsweep.models.conversion import Conversion, FirstStep, Part, Skipped
from hqsweep.models.experts import EXPERT_KINDS
from hqsweep.models.held import candidates_of, check_release, held_weights, release_weights
from hqsweep.models.kinds import (
    Kind,
    bypassed,
    check_model,
    experts_per_row,
    instance_fault,
    multiply_adds,
    parts_of,
    why_left,
)
from hqsweep.models.linear import Conv1DKind, LinearKind, output_projection
from hqsweep.nn.core.guards import refuse_second_runs
from hqsweep.nn.core.module import PARTS, QuantizedModule, set_recipe_of
from hqsweep.nn.core.options import holds_weights
from hqsweep.ops.quantize.kernels import DTYPES
from hqsweep.recipe.argument import RecipeArgument, whole_recipe
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import GemmModule
from hqsweep.recipe.roles import HEAD, clean_name
from hqsweep.recipe.sectioned import layers_of
from hqsweep.recipe.validate import recipe_faults

Filter = Callable[[nn.Module, str], bool]
KINDS: tuple[Kind, ...] = (LinearKind(), Conv1DKind(), AttentionKind(), *EXPERT_KINDS)
"""The kinds of modules; the first one that matches a module takes it."""
CONVERSION = "_hqsweep_conversion"
"""The attribute of a model that convert() was given, for its Conversion."""
NARROWEST = 16
"""The least number of in or out features that linears need to be taken without a filter_fn."""
ADAPTERS = ("lora_", "modules_to_save")
"""The prefixes that PEFT gives to names of trained parts, which are not taken without a filter_fn."""


@dataclass(frozen=True, eq=False)
class Target:
    """A module that convert() takes."""

    module: nn.Module
    kind: Kind
    name: str
    """The name in its roles."""
    gemms: Sequence[GemmModule]


def convert(
    model: nn.Module,
    recipe: RecipeArgument,
    filter_fn: Filter | None = None,
    *,
    head: bool = False,
    experts: bool = True,
    attention: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Conversion:
    """Have the modules of a model compute by a recipe, in place, and return the Conversion.

    Parameters, keys of state_dict, ties, hooks, devices, dtypes and isinstance(module, nn.Linear) do not change. A
    module's roles have its fully qualified name without wrappers (clean_name). Products have the bytes of
    hqsweep.nn.Linear in the dtype of the call: torch.autocast's where it is on, else the weight's. Inside
    hqsweep.nn.quantization() modules draw the random bits of its step. set_recipe, autocast, probes and schedules work
    as on modules of hqsweep.nn.

    recipe: a Recipe or CustomRecipe, the mapping of one, or a text, as modules of hqsweep.nn take it. A text is the
    name of a recipe, as on the command line, a path, or a format for all products ("format:nvfp4"). filter_fn(module,
    name) says which modules are taken, in addition to the recipe's overrides. Without it all are taken except adapters
    (PEFT's lora_*) and linears of fewer than 16 features. head: take the output projection too, by the recipe's `head`;
    its role's name is "head". experts, attention: take experts of a mixture, and attention; by default attention is
    taken if recipe.dpa quantizes it.

    Conversion.share is the converted part of the model's multiplications by weights. `skipped` lists, with a reason,
    every other module that multiplies by weights: nn.LSTM, convolutions, nn.Bilinear, nn.MultiheadAttention, and
    modules with matrices of their own.

    A module that is converted already takes the recipe, as by set_recipe, and keeps its names.

    Inside hqsweep.nn.quantized_model_init() the weights of taken modules become HybridQuantizedTensors. These are new
    parameters: build the optimizer (hqsweep.optim.FusedAdam) afterwards. Linears that share a weight still share it.
    Conversion.plain lists the weights that stay plain, with reasons: weights that other code reads too, and formats
    that are not quantized. dtype: the dtype of the products of held weights, to which weights are rounded before they
    are quantized. By default it is torch.autocast's, where it is on for the weight's device, else the weight's. A call
    in another dtype is refused.

    Raises:
        UserError: nothing is taken; a taken module has a shape that a format cannot take, or products that cannot meet;
            an override matches nothing; the model is sharded, or quantized by another library; dtype is given outside
            of quantized_model_init(). The model is then as it was.
    """
    check_model(model)
    if not (filter_fn is None or callable(filter_fn)):
        raise UserError(f"convert: filter_fn is {filter_fn!r}; it takes a function (module, name) -> bool, or None")
    _check_dtype(dtype)
    recipe = whole_recipe(recipe, "convert")
    kinds = _kinds(recipe, {"experts": experts, "attention": attention})
    targets, skipped, left = _plan(model, kinds, filter_fn, head)
    if not targets:
        raise UserError(_nothing(model, skipped))
    _check_products(recipe, targets)
    new = _new_parts(recipe, targets)
    every = (candidates_of(t.kind, t.module, new.get(t) or parts_of(t.module)) for t in targets)
    candidates = [candidate for own in every for candidate in own] if holds_weights() else []
    held, plain = held_weights(model, candidates, dtype)
    for target, parts in new.items():
        target.module.__dict__[PARTS] = parts
        target.kind.swap(target.module)
    for candidate, parameter in held:
        setattr(candidate.module, candidate.part.weight_name, parameter)
    for kind in dict.fromkeys(target.kind for target in targets):
        kind.swapped(model)
    stay = [Skipped(candidate.part.name, tuple(candidate.weight.shape), why) for candidate, why in plain]
    skips, ties = [*skipped, *left], _ties(model)
    conversion = Conversion(_converted_parts(model, targets), skips, ties, stay, scheduled=bool(recipe.schedule))
    model.__dict__[CONVERSION] = conversion
    FirstStep([part.module for part in conversion.parts])
    return conversion


def _check_products(recipe: AnyRecipe, targets: Sequence[Target]) -> None:
    """Raise UserError for shapes that a format cannot take, and for operands that cannot meet."""
    faults = list(recipe_faults(recipe, [gemm for target in targets for gemm in target.gemms]))
    if faults:
        raise UserError(
            f"convert: {'; '.join(faults)}; leave such modules out by filter_fn, or keep them in high precision by an"
            " override of the recipe"
        )


def _new_parts(recipe: AnyRecipe, targets: Sequence[Target]) -> dict[Target, tuple[QuantizedModule, ...]]:
    """Return target -> its new parts, for targets that are not converted yet. All targets take the recipe."""
    alone = recipe.for_layers(layers_of([role for target in targets for gemm in target.gemms for role in gemm.roles]))
    new = {
        target: tuple(target.kind.parts(target.module, target.name, alone))
        for target in targets
        if not parts_of(target.module)
    }
    known = [part for target in targets for part in parts_of(target.module)]
    set_recipe_of([*known, *(part for parts in new.values() for part in parts)], recipe)  # also checks common names
    return new


def _converted_parts(model: nn.Module, targets: Sequence[Target]) -> list[Part]:
    """Return the entries of Conversion.parts."""
    chosen = experts_per_row(model)
    return [
        Part(target.kind.name, _shape(gemm), part, _multiply_adds(gemm, part, chosen))
        for target in targets
        for gemm, part in _pairs(target)
    ]


def gemm_modules_of(
    model: nn.Module, recipe: AnyRecipe, *, head: bool = False, attention: bool | None = None
) -> list[GemmModule]:
    """The products that convert() would take of a model, which may be on the meta device; the rows of their inputs are
    0. UserError where it would take none, or refuse the model."""
    check_model(model)
    targets, skipped, _ = _plan(model, _kinds(recipe, {"experts": True, "attention": attention}), None, head)
    if not targets:
        raise UserError(_nothing(model, skipped))
    return [gemm for target in targets for gemm in target.gemms]


def revert(model: nn.Module) -> int:
    """Undo convert() for this model or modules of it, and return the number of modules; 0 for none.

    A held weight becomes a plain parameter of its dtype again. Its values are those that
    preserve_high_precision_init_val keeps, until the first step of hqsweep.optim.FusedAdam takes them; else the decoded
    operands. The masters of an optimizer are not read.

    UserError where a class was derived from a converted one afterwards, as FSDP does, and for held weights that are
    sharded over ranks; nothing is reverted then.
    """
    converted_modules = [(module, _kind_of(module)) for module in model.modules() if parts_of(module)]
    for module, kind in converted_modules:
        kind.check_restore(module)
    check_release(model)
    release_weights(model)
    for module, kind in converted_modules:
        kind.restore(module)
        for part in module.__dict__.pop(PARTS):
            refuse_second_runs(module, part, part.name, part.runs)
    for kind in dict.fromkeys(kind for _, kind in converted_modules):
        kind.restored(model)
    for module in model.modules():
        module.__dict__.pop(CONVERSION, None)
    return len(converted_modules)


@contextmanager
def converted(
    model: nn.Module,
    recipe: RecipeArgument,
    filter_fn: Filter | None = None,
    *,
    head: bool = False,
    experts: bool = True,
    attention: bool | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Conversion]:
    """convert() within a context: with converted(model, "mxfp8") as conversion: ... UserError for a model that is
    converted already."""
    if any(map(parts_of, model.modules())):
        raise UserError("converted: the model is converted already; revert it first, or give it a recipe by set_recipe")
    conversion = convert(model, recipe, filter_fn, head=head, experts=experts, attention=attention, dtype=dtype)
    try:
        yield conversion
    finally:
        revert(model)


def conversion_of(model: nn.Module) -> Conversion:
    """The result of convert() for this model, or for the first module of it that was converted; UserError where there
    is none."""
    conversions = (module.__dict__[CONVERSION] for module in model.modules() if CONVERSION in module.__dict__)
    conversion = next(conversions, None)
    if conversion is None:
        raise UserError(f"conversion_of: {type(model).__name__} was not converted; call hqsweep.convert first")
    return conversion


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not holds_weights():
        raise UserError(
            "convert: dtype is that of the products of weights that are held quantized; call it inside of"
            " hqsweep.nn.quantized_model_init(), or leave dtype out"
        )
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"convert: dtype is {dtype!r}; it takes {', '.join(map(str, DTYPES))}, or None")


def _kinds(recipe: AnyRecipe, options: Mapping[str, bool | None]) -> list[Kind]:
    chosen = {kind: True if kind.option is None else options[kind.option] for kind in KINDS}
    return [kind for kind, taken in chosen.items() if taken or (taken is None and kind.wanted(recipe))]


def _kind_of(module: nn.Module) -> Kind:
    return next(kind for kind in KINDS if kind.matches(module))


def _plan(
    model: nn.Module, kinds: Sequence[Kind], filter_fn: Filter | None, head: bool
) -> tuple[list[Target], list[Skipped], list[Skipped]]:
    """Return (taken, skipped, left): the modules of these kinds, and the others that multiply by weights.

    A converted module counts as taken.
    """
    projection, unheard, targets, skipped, left = output_projection(model), bypassed(model), [], [], []
    chosen, others = experts_per_row(model), [kind for kind in KINDS if kind not in kinds]
    for fqn, module in model.named_modules():
        name = clean_name(fqn) or type(module).__name__
        if parts_of(module):
            targets.append(_converted_target(module, name))
            continue
        kind = next((kind for kind in kinds if kind.matches(module)), None)
        if kind is None:
            if why := why_left(module, others):
                left.append(Skipped(name, _weight_shape(module), why, multiply_adds(module, chosen)))
            continue
        why = unheard.get(module) or instance_fault(module) or kind.fault(module)
        gemms = [] if why else kind.gemm_modules(module, HEAD if module is projection else name)
        if not why and module is projection and not head:
            why = "the output projection; head=True takes it"
        if not why:
            why = _filtered(module, name, gemms, filter_fn)
        if why:
            shape = _shape(gemms[0]) if gemms else _weight_shape(module)
            skipped.append(Skipped(name, shape, why, multiply_adds(module, chosen)))
        else:
            kind.check(module, name)
            targets.append(Target(module, kind, HEAD if module is projection else name, gemms))
    return targets, skipped, left


def _converted_target(module: nn.Module, name: str) -> Target:
    """A module that is converted already, whose parts keep the names of their roles."""
    kind = _kind_of(module)
    named = zip(kind.gemm_modules(module, name), parts_of(module), strict=True)
    return Target(module, kind, name, [replace(gemm, name=part.name) for gemm, part in named])


def _filtered(module: nn.Module, name: str, gemms: Sequence[GemmModule], filter_fn: Filter | None) -> str | None:
    """Why a module that could be taken is not wanted."""
    if filter_fn is not None:
        return None if filter_fn(module, name) else "filter_fn said no"
    if any(part.startswith(ADAPTERS) for part in name.split(".")):
        return "an adapter; a filter_fn takes it"
    if any(0 < min(_shape(gemm), default=NARROWEST) < NARROWEST for gemm in gemms):
        return f"fewer than {NARROWEST} features; a filter_fn takes it"
    return None


def _shape(gemm: GemmModule) -> tuple[int, ...]:
    """The shape [N, K] of its weight; empty without one."""
    return gemm.shapes["fprop"][1:] if "fprop" in gemm.shapes else ()


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return () if not isinstance(weight, Tensor) or nn.parameter.is_lazy(weight) else tuple(weight.shape)


def _multiply_adds(gemm: GemmModule, part: QuantizedModule, chosen: int) -> int:
    """The multiply-adds of a part for one row of its module's input; see models.kinds."""
    each = math.prod(_shape(gemm)) if _shape(gemm) else 0
    return each * min(chosen, part.num_experts) if gemm.module_type == "grouped_linear" else each


def _pairs(target: Target) -> Iterator[tuple[GemmModule, QuantizedModule]]:
    return zip(target.gemms, parts_of(target.module), strict=True)


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names that share a parameter: the first, and each other one."""
    first, tied = {}, []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied.append((clean_name(known), clean_name(name)))
    return tied


def _nothing(model: nn.Module, skipped: Sequence[Skipped]) -> str:
    """Return the sentence for a model without a module to take."""
    start = f"convert: nothing of {type(model).__name__} is taken"
    if skipped:
        names = "; ".join(f"{module.name}: {module.why}" for module in skipped[:3])
        more = f", and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        return f"{start}: {names}{more}"
    kinds = ", ".join(dict.fromkeys(kind.name for kind in KINDS))
    leaves = dict.fromkeys(type(module).__name__ for module in model.modules() if not list(module.children()))
    return f"{start}: it has no module of a kind that can be ({kinds}), but {', '.join(list(leaves)[:3])}"
