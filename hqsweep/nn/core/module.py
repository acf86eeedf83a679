"""QuantizedModule: a module with a quantizer per tensor. set_recipe() gives a whole model its quantizers.
QuantizedWeight is the base of modules whose weight is not a GEMM operand, such as embedding tables and norms.

Quantizers are values. A module holds one frozen section of them. A new recipe replaces only slots that differ by value,
so that state keyed by a quantizer (a cached weight, a history) survives.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.memo import memo
from hqsweep.nn.core.context import NUMBERED_PARTS, Context, autocast_recipe, current, slot_numbers
from hqsweep.nn.core.delayed import DelayedStates
from hqsweep.nn.core.guards import Runs, refusal, refuse_transforms
from hqsweep.nn.core.parameter import rounded
from hqsweep.nn.core.wire import WeightRanks
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.products import check_products, section_faults
from hqsweep.recipe.roles import GRADIENTS, TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sectioned import unread_overrides
from hqsweep.recipe.sections import Faults, Section, WeightQuantizers, slots
from hqsweep.torch_private import current_graph_task_id, top_saved_tensors_hooks, transforms

BOUNDARIES = MappingProxyType({"output": "output_quantizer_role", "grad_input": "grad_input_quantizer_role"})
"""QuantizedModule.BOUNDARIES of linears and attention."""

_PRODUCTS = ("linear", "grouped_linear", "dpa")
"""Module types whose traces leave out the name if nothing depends on it."""
_NUMBERED = ("linear", "dpa")
"""Module types whose random bits can be keyed by slot numbers instead of names."""
_IN_A_TRACE = "a module under torch.compile (without it this message has its name)"


class QuantizedModule(nn.Module):
    """The base of hqsweep's modules.

    A subclass sets module_type, name and quantizers, and reads its quantizers from active_quantizers().
    """

    module_type: str
    gemm: str = "exact"
    """The mode of its GEMMs outside autocast."""

    expert: int | None = None
    """The expert of a grouped linear that this module represents; None: no expert."""

    BOUNDARIES: Mapping[str, str] = MappingProxyType({})
    """Boundary slot -> the attribute that holds its role."""

    def __init__(self) -> None:
        super().__init__()
        self.states = DelayedStates()
        self._autocast: tuple[object, Section, str, tuple[HybridQuantizer, ...]] | None = None
        self.runs = Runs()

    @property
    def name(self) -> str:
        """The fully qualified name, used in roles and random-bit slots."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        self._slot_numbers = slot_numbers(self.module_type, name) if self.module_type in _NUMBERED else {}

    @property
    def quantizers(self) -> Section:
        """The quantizers outside autocast, one field per slot. Setting them creates their states."""
        return self._quantizers

    @quantizers.setter
    def quantizers(self, quantizers: Section) -> None:
        self._quantizers = quantizers
        self.states.add(slots(quantizers))

    def slot_roles(self) -> dict[str, QuantizerRole | None]:
        """Return slot -> role: the module's own tensors, then boundary slots, whose role is None without a reader."""
        own = {t: QuantizerRole(self.module_type, t, self.name) for t in TENSOR_TYPES[self.module_type]}
        return own | self.boundary_roles()

    def boundary_roles(self) -> dict[str, QuantizerRole | None]:
        """Return boundary slot -> its reader's role."""
        return {slot: getattr(self, attribute) for slot, attribute in self.BOUNDARIES.items()}

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """Return the roles of the forward or backward slots in order, the boundary slot last."""
        return [role for slot, role in self.slot_roles().items() if (slot in (*GRADIENTS, "grad_input")) != fwd]

    def chosen(self, resolved: Mapping[QuantizerRole, HybridQuantizer]) -> dict[str, HybridQuantizer | None]:
        """Return the fields of the section: slot -> its role's quantizer."""
        return {slot: None if role is None else resolved[role] for slot, role in self.slot_roles().items()}

    def section_of(self, resolved: Mapping[QuantizerRole, HybridQuantizer]) -> Section:
        """Return the section with these roles' quantizers. Equal slots keep their present objects."""
        changed = {slot: q for slot, q in self.chosen(resolved).items() if getattr(self.quantizers, slot) != q}
        return replace(self.quantizers, **changed) if changed else self.quantizers

    def rebuild(self, quantizers: Section, gemm: str) -> int:
        """Set quantizers and GEMM mode, and return the number of slots that changed by value."""
        self.gemm = gemm
        old, new = slots(self.quantizers), slots(quantizers)
        changed = sum(old[slot] != new[slot] for slot in new)
        if changed:
            self.quantizers = quantizers
            self.states.keep(new)
        return changed

    def active_quantizers(self) -> Section:
        """Return the quantizers of this call: from the innermost autocast, else the module's own.

        Under autocast each slot is resolved at the first call: once per Recipe, or once per autocast for a
        CustomRecipe. It raises as check_products() does.
        """
        recipe = autocast_recipe()
        return self._quantizers if recipe is None else self._quantizers_under(recipe)

    def _quantizers_under(self, recipe: AnyRecipe) -> Section:
        known, answers = self._autocast, recipe.answers_of
        if known is None or (known[0] is not answers and known[0] != answers):
            roles, unread = self.slot_roles(), self.unread_boundaries()
            resolved = {role: recipe.quantizer(role) for role in dict.fromkeys(roles.values()) if role is not None}
            for role in unread:
                recipe.check_boundary(role)
            of_roles = tuple(resolved.values())
            if known is not None and known[2:] == (recipe.gemm, of_roles):
                quantizers = known[1]
            else:
                quantizers = self.section_of(resolved)
                check_products([(self.module_type, self.name, quantizers)], recipe.gemm)
            self._autocast = answers, quantizers, recipe.gemm, of_roles
        return self._autocast[1]

    def unread_boundaries(self) -> list[QuantizerRole | None]:
        """Return a None for each boundary slot without a reader. As in TransformerEngine, a factory gets None as its
        role."""
        return [role for role in self.boundary_roles().values() if role is None]

    def call_facts(self) -> dict[str, Any]:
        """Return the present fields of a Call.

        A trace leaves out the name if nothing depends on it. One trace then serves all blocks of a model that are
        compiled separately.
        """
        recipe, context = autocast_recipe(), current()
        quantizers = self._quantizers if recipe is None else self._quantizers_under(recipe)
        self.check_scope(quantizers, recipe, context)
        traced = torch.compiler.is_compiling()  # a trace may be inside a transform, and must not read the name
        if not traced and (transforms() is not None or forward_ad._current_level >= 0):
            refuse_transforms(self.name)
        if quantizers.stochastic:
            self.claim_bits(context)
        nameless = traced and self._is_nameless(quantizers, context)
        return {
            "module_type": self.module_type,
            "name": _IN_A_TRACE if nameless else self.name,
            "slot_numbers": self._slot_numbers if nameless and quantizers.stochastic else None,
            "expert": self.expert,
            "dtype": self.dtype,
            "gemm": self.gemm if recipe is None else recipe.gemm,
            "quantizers": quantizers,
            "context": context,
            "states": self.states,
            "epoch": self.states.epoch,
            "grad": torch.is_grad_enabled(),
        }

    def _is_nameless(self, quantizers: Section, context: Context) -> bool:
        """Return whether a call needs its module's name only for messages. Random bits are then keyed by slot
        numbers."""
        own = [quantizer for quantizer in slots(quantizers).values() if quantizer is not None]
        if self.module_type not in _PRODUCTS or any(type(q) is not HybridQuantizer or q.delayed for q in own):
            return False
        alone = quantizers.output is None and quantizers.grad_input is None
        keyed = len(self._slot_numbers) > 0 and context.microbatch < NUMBERED_PARTS
        return alone and (keyed or not quantizers.stochastic)

    def claim_bits(self, context: Context) -> None:
        """Raise UserError if another module draws the same random bits in this step.

        Outside a step, other modules are unknown; compiled calls are not checked.
        """
        if context.step is not None and not torch.compiler.is_compiling():
            context.claim((self.module_type, self.name, self.expert), self)

    def check_scope(self, quantizers: Section, recipe: AnyRecipe | None, context: Context) -> None:
        """Raise UserError for a recomputation that would compute other values than the call that it repeats.

        That is so outside that call's autocast() or quantization(), inside other ones, or with another recipe.
        """
        if torch.compiler.is_dynamo_compiling():
            return
        counter, gemm = context.counter, self.gemm if recipe is None else recipe.gemm
        writes = None if counter is None else (id(counter), counter._version)
        key = (context.seed, context.step, context.microbatch)
        run = (quantizers, gemm, recipe is not None, key, writes, context.kernels, self.states.epoch)
        hooked = top_saved_tensors_hooks(True)  # inlined: a call takes half a us
        if hooked is None and torch.is_grad_enabled() and current_graph_task_id() == -1:
            self.runs.last = run  # certainly no recomputed part
        elif lost := self.runs.note(self, run):
            raise refusal(self.name, lost)

    def identity(self) -> Format | None:
        """Return the high-precision format that all slots have in this call, or None if something is quantized.

        With an identity the call may run as the plain module.
        """
        recipe = autocast_recipe()
        quantizers = self._quantizers if recipe is None else self._quantizers_under(recipe)
        if quantizers.identity is not None:
            self.check_scope(quantizers, recipe, current())
        return quantizers.identity

    def _save_to_state_dict(self, *args: Any) -> None:
        self.states.add(slots(self.active_quantizers()))  # autocast's, too
        super()._save_to_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_autocast": None, "runs": Runs()}


class Boundary:
    """The role of a boundary slot, as a descriptor.

    Setting another role drops autocast's resolved quantizers, and the slot has no quantizer until the next
    set_recipe(). Setting the same role does nothing.
    """

    def __init__(self, slot: str) -> None:
        self.slot = slot

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, module: QuantizedModule | None, owner: type) -> Any:
        return self if module is None else getattr(module, self.name, None)

    def __set__(self, module: QuantizedModule, role: QuantizerRole | None) -> None:
        if role != getattr(module, self.name, None):
            setattr(module, self.name, role)
            module._autocast = None
            module.quantizers = replace(module.quantizers, **{self.slot: None})


PARTS = "_hqsweep_parts"
"""Attribute of a converted module: the QuantizedModules that compute for it, which are not in its module tree."""


def quantized_modules(model: nn.Module) -> list[QuantizedModule]:
    """Return all modules of a model that have quantizers, once each, in order. PARTS stand in for converted modules."""
    modules = []
    for module in model.modules():
        modules += [module] if isinstance(module, QuantizedModule) else getattr(module, PARTS, ())
    return modules


WHOLE_ROLES = "_hqsweep_whole_roles"
"""Attribute of a part of a model, whose other modules are on other ranks: the whole model's roles, in order."""


def roles_of(model: nn.Module) -> list[QuantizerRole]:
    """Return the roles of all modules in order; for a part of a model, the whole model's. A recipe counts layers over
    them."""
    whole = getattr(model, WHOLE_ROLES, None)
    return _roles(quantized_modules(model)) if whole is None else whole


def _roles(modules: Sequence[QuantizedModule]) -> list[QuantizerRole]:
    return list(dict.fromkeys(role for module in modules for role in module.slot_roles().values() if role is not None))


def set_recipe(model: nn.Module, recipe: AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any]) -> int:
    """Give every slot the recipe's quantizer, and every module its GEMM mode. Return how many slots changed by value.

    recipe: also a recipe's name, a path, or a format ("format:nvfp4"), which applies to all products, as does a section
    of linears. Each role is resolved once, and layers are counted over the whole model. A schedule is not followed.

    UserError as recipe.resolve() raises it; for products whose operands cannot meet, overrides that match no module,
    two modules with one name that would draw the same random bits, and a model without modules of hqsweep.nn. The model
    is unchanged then.
    """
    from hqsweep.recipe.argument import whole_recipe  # not every module needs the parser of recipes

    modules = quantized_modules(model)
    if not modules:
        raise UserError(
            f"set_recipe: {type(model).__name__} has no module of hqsweep.nn; build it of these, or give it to"
            " hqsweep.convert first"
        )
    return set_recipe_of(modules, whole_recipe(recipe, "set_recipe"), getattr(model, WHOLE_ROLES, None))


def set_recipe_of(
    modules: Sequence[QuantizedModule], recipe: AnyRecipe, whole: Sequence[QuantizerRole] | None = None
) -> int:
    """Run set_recipe() for a model with these modules. whole: the roles of the whole model, if these are a part."""
    roles = _roles(modules) if whole is None else whole
    faults = Faults()
    faults.texts += unread_overrides(recipe, roles)
    resolved = recipe.resolve(roles)
    sections = [module.section_of(resolved) for module in modules]
    named = [(module.module_type, module.name, section) for module, section in zip(modules, sections, strict=True)]
    faults.texts += section_faults(named, recipe.gemm)
    faults.texts += _shared_bits(modules, sections)
    faults.raise_any()
    return sum(module.rebuild(section, recipe.gemm) for module, section in zip(modules, sections, strict=True))


def _shared_bits(modules: Sequence[QuantizedModule], sections: Sequence[Section]) -> Iterator[str]:
    """Yield a fault for each name whose modules would draw the same random bits."""
    drawing = [m for m, section in zip(modules, sections, strict=True) if section.stochastic]
    for (module_type, name, _), count in Counter((m.module_type, m.name, m.expert) for m in drawing).items():
        if count > 1:
            yield (
                f"{name}: {count} modules ({module_type}) of this name round stochastically and would draw the same"
                " random bits; give each a name of its own"
            )


class QuantizedWeight(QuantizedModule):
    """A module whose single weight is rounded to the quantizer's rowwise format."""

    quantizers: WeightQuantizers
    parallel: WeightRanks | None = None
    """How ranks share the parameters; None: this rank has all of them."""

    def own(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, as forward reads it."""
        return parameter if self.parallel is None else self.parallel.own(parameter)

    def quantized_weight(self) -> Tensor:
        """Return self.weight, or this rank's part of it, rounded by rounded()."""
        quantizers, context = self.active_quantizers(), current()
        quantizer = quantizers.weight
        self.check_scope(quantizers, autocast_recipe(), context)
        if quantizer.stochastic:
            self.claim_bits(context)
        call = {"step": context.step, "record": torch.is_grad_enabled(), "group": context.amax_group}
        states = self.states.of("weight", quantizer, device=self.weight.device, **call)
        weight, key = self.own(self.weight), context.key(_slot(self.module_type, self.name))
        part = None if self.parallel is None else self.parallel.part
        return rounded(weight, quantizer, key, states, part)


@memo
def _slot(module_type: str, name: str) -> str:
    """Return the slot of the weight's random bits."""
    return str(QuantizerRole(module_type, "weight", name))
