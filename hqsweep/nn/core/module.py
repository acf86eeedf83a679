"""QuantizedModule: a module with a quantizer for each of its tensors; set_recipe gives a whole model its quantizers.

Quantizers are values. A module holds one frozen section of them; another recipe replaces it where a slot differs by
value and leaves everything else as it is, so that what is keyed by a quantizer (a cached weight, a history) survives.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.nn.core.call_marks import Runs, refusal
from hqsweep.nn.core.context import Context, autocast_recipe, current
from hqsweep.nn.core.delayed import DelayedStates
from hqsweep.nn.core.products import refuse_transforms
from hqsweep.nn.core.slot_numbers import NUMBERED_PARTS, slot_numbers
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import GRADIENTS, TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import Faults, Section, slots
from hqsweep.recipe.validate import check_products, section_faults, unread_overrides
from hqsweep.torch_private import current_graph_task_id, top_saved_tensors_hooks, transforms

BOUNDARIES = MappingProxyType({"output": "output_quantizer_role", "grad_input": "grad_input_quantizer_role"})
"""QuantizedModule.BOUNDARIES of linears and attention."""

_PRODUCTS = ("linear", "grouped_linear", "dpa")
"""Types of modules whose traces leave the name out, where nothing depends on it."""
_NUMBERED = ("linear", "dpa")
"""Types of modules whose random bits can be keyed by the numbers of their slots instead."""
_IN_A_TRACE = "a module under torch.compile (without it this message has its name)"


class QuantizedModule(nn.Module):
    """The base of hqsweep's modules: a subclass sets module_type, name and quantizers, and reads its quantizers from
    active_quantizers()."""

    module_type: str
    gemm: str = "exact"
    """The mode of its GEMMs outside of autocast."""

    expert: int | None = None
    """The expert of a grouped linear whose slots it has; None: it is no expert."""

    BOUNDARIES: Mapping[str, str] = MappingProxyType({})
    """Boundary slot -> the attribute that holds its role."""

    def __init__(self) -> None:
        super().__init__()
        self.states = DelayedStates()
        self._autocast: tuple[object, Section, str, tuple[HybridQuantizer, ...]] | None = None
        self.runs = Runs()

    @property
    def name(self) -> str:
        """The fully qualified name, which its roles and its slots of random bits have."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        self._slot_numbers = slot_numbers(self.module_type, name) if self.module_type in _NUMBERED else {}

    @property
    def quantizers(self) -> Section:
        """The quantizers outside of autocast: a field for each slot. Setting them makes their states."""
        return self._quantizers

    @quantizers.setter
    def quantizers(self, quantizers: Section) -> None:
        self._quantizers = quantizers
        self.states.add(slots(quantizers))

    def slot_roles(self) -> dict[str, QuantizerRole | None]:
        """Slot -> role: the module's own tensors, then the boundary slots, whose role is None without a reader."""
        own = {t: QuantizerRole(self.module_type, t, self.name) for t in TENSOR_TYPES[self.module_type]}
        return own | self.boundary_roles()

    def boundary_roles(self) -> dict[str, QuantizerRole | None]:
        """Boundary slot -> the role of its reader."""
        return {slot: getattr(self, attribute) for slot, attribute in self.BOUNDARIES.items()}

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """The roles of the forward slots, or of the backward ones, in order, the boundary slot last."""
        return [role for slot, role in self.slot_roles().items() if (slot in (*GRADIENTS, "grad_input")) != fwd]

    def chosen(self, resolved: Mapping[QuantizerRole, HybridQuantizer]) -> dict[str, HybridQuantizer | None]:
        """The fields of the section: the quantizer of each slot's role."""
        return {slot: None if role is None else resolved[role] for slot, role in self.slot_roles().items()}

    def section_of(self, resolved: Mapping[QuantizerRole, HybridQuantizer]) -> Section:
        """The section with the quantizers of these roles; slots that are equal keep the objects that they have."""
        changed = {slot: q for slot, q in self.chosen(resolved).items() if getattr(self.quantizers, slot) != q}
        return replace(self.quantizers, **changed) if changed else self.quantizers

    def rebuild(self, quantizers: Section, gemm: str) -> int:
        """Take these quantizers and a mode; returns how many slots have changed by value."""
        self.gemm = gemm
        old, new = slots(self.quantizers), slots(quantizers)
        changed = sum(old[slot] != new[slot] for slot in new)
        if changed:
            self.quantizers = quantizers
            self.states.keep(new)
        return changed

    def active_quantizers(self) -> Section:
        """The quantizers of this call: those of the innermost autocast, else the module's own.

        Under autocast each slot is resolved once for a recipe, or once in each autocast for a CustomRecipe, at the
        first call, which raises as check_products does.
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
        """The roles by which a factory is asked for boundary slots without a reader: None, as in TransformerEngine."""
        return [role for role in self.boundary_roles().values() if role is None]

    def call_facts(self) -> dict[str, Any]:
        """The fields of a Call, as they are now. A trace leaves the name out where nothing depends on it, so that one
        trace serves all blocks of a model that are compiled one by one."""
        recipe, context = autocast_recipe(), current()
        quantizers = self._quantizers if recipe is None else self._quantizers_under(recipe)
        self.check_scope(quantizers, recipe, context)
        traced = torch.compiler.is_compiling()  # a trace may be within a transform, and must not read the name for it
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
        """Whether a call needs the name of its module for messages alone: random bits, if any are drawn, are keyed by
        the numbers of its slots."""
        own = [quantizer for quantizer in slots(quantizers).values() if quantizer is not None]
        if self.module_type not in _PRODUCTS or any(type(q) is not HybridQuantizer or q.delayed for q in own):
            return False
        alone = quantizers.output is None and quantizers.grad_input is None
        keyed = len(self._slot_numbers) > 0 and context.microbatch < NUMBERED_PARTS
        return alone and (keyed or not quantizers.stochastic)

    def claim_bits(self, context: Context) -> None:
        """UserError where another module draws the same random bits in this step. Outside of any step nothing is known
        of other modules, and a compiled call is not checked."""
        if context.step is not None and not torch.compiler.is_compiling():
            context.claim((self.module_type, self.name, self.expert), self)

    def check_scope(self, quantizers: Section, recipe: AnyRecipe | None, context: Context) -> None:
        """UserError for a call within a backward pass that would compute something else than the call that it repeats:
        outside of the autocast() or the quantization() of that one, in those of another, or on another recipe."""
        if torch.compiler.is_dynamo_compiling():
            return
        counter, gemm = context.counter, self.gemm if recipe is None else recipe.gemm
        writes = None if counter is None else (id(counter), counter._version)
        key = (context.seed, context.step, context.microbatch)
        run = (quantizers, gemm, recipe is not None, key, writes, context.kernels, self.states.epoch)
        hooked = top_saved_tensors_hooks(True)  # no calls of ours: each takes half a us
        if hooked is None and torch.is_grad_enabled() and current_graph_task_id() == -1:
            self.runs.last = run  # this is surely neither a first nor a second run of a part that runs again
        elif lost := self.runs.note(self, run):
            raise refusal(self.name, lost)

    def identity(self) -> Format | None:
        """The high-precision format of all slots in this call, which is then as good as the plain module's; None where
        something is quantized."""
        recipe = autocast_recipe()
        quantizers = self._quantizers if recipe is None else self._quantizers_under(recipe)
        if quantizers.identity is not None:
            self.check_scope(quantizers, recipe, current())
        return quantizers.identity

    def _save_to_state_dict(self, *args: Any) -> None:
        self.states.add(slots(self.active_quantizers()))  # those of an autocast, too
        super()._save_to_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_autocast": None, "runs": Runs()}


class Boundary:
    """The role of a boundary slot. Setting another one gives up what autocast has resolved, and the slot waits, without
    a quantizer, for the next set_recipe; setting the same one does nothing."""

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
"""The attribute of a converted module that holds the QuantizedModules by which it computes, which are not in its
tree."""


def quantized_modules(model: nn.Module) -> list[QuantizedModule]:
    """All modules of a model that have quantizers, each once, in order; a converted module's PARTS stand in its
    place."""
    modules = []
    for module in model.modules():
        modules += [module] if isinstance(module, QuantizedModule) else getattr(module, PARTS, ())
    return modules


WHOLE_ROLES = "_hqsweep_whole_roles"
"""The attribute of a part of a model, whose other modules are on other ranks, that holds the roles of the whole in
order."""


def roles_of(model: nn.Module) -> list[QuantizerRole]:
    """The roles of all modules of a model in order, over which a recipe counts layers; for a part, those of the
    whole."""
    whole = getattr(model, WHOLE_ROLES, None)
    return _roles(quantized_modules(model)) if whole is None else whole


def _roles(modules: Sequence[QuantizedModule]) -> list[QuantizerRole]:
    return list(dict.fromkeys(role for module in modules for role in module.slot_roles().values() if role is not None))


def set_recipe(model: nn.Module, recipe: AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any]) -> int:
    """Give every slot of the model the recipe's quantizer, and every module its mode of GEMMs; returns how many slots
    have changed by value. A text is the name of a recipe, a path, or a format ("format:nvfp4"), which is for all
    products, as is the section of a linear.

    Each role is resolved once, and layers are counted over the whole model. A schedule is not followed here.

    Raises:
        UserError: as recipe.resolve does; for products whose operands cannot meet, overrides that match no module, two
            modules of one name that would draw the same random bits, and a model without modules of hqsweep.nn. The
            model is then as it was.
    """
    from hqsweep.nn.core.recipe_argument import whole_recipe  # the parser of recipes is not for every module

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
    """set_recipe for a model that has these modules. whole: the roles of the model of which they are a part."""
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
    """The names of modules that would draw the same random bits as others."""
    drawing = [m for m, section in zip(modules, sections, strict=True) if section.stochastic]
    for (module_type, name, _), count in Counter((m.module_type, m.name, m.expert) for m in drawing).items():
        if count > 1:
            yield (
                f"{name}: {count} modules ({module_type}) of this name round stochastically and would draw the same"
                " random bits; give each a name of its own"
            )
