"""The recipe of a suggestion, and the models that have its names."""

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from hqsweep.config.job import grouped_shapes, linear_shapes
from hqsweep.config.model import ModelConfig
from hqsweep.jobs.probe.suggest import Suggestion
from hqsweep.jobs.probe.together import SLOTS, slot_of
from hqsweep.recipe.schedule import parse_recipe

HIGH_PRECISION = "bf16"


def recipe_of(suggestion: Suggestion, name: str) -> dict[str, Any]:
    """A `recipe` config: the quantizers of most elements for all linears, overrides for modules that take others.

    A slot that was not measured takes the quantizer of its module's weight, or (strict pairs) one that makes all three
    GEMMs strict. For strict pairs the recipe says gemm: strict, which refuses anything else that is put into it.
    """
    elements: Counter[str] = Counter()
    own: dict[str, dict[str, str]] = defaultdict(dict)
    for choice in suggestion.choices:
        elements[choice.quantizer] += choice.elements
        module, slot = slot_of(choice.tensor)
        own[module][slot] = choice.quantizer
    for tensor in suggestion.left_out:
        module, slot = slot_of(tensor)
        own[module][slot] = HIGH_PRECISION
    strict = bool(suggestion.linears)
    if strict:
        linears = {module: suggestion.linears.get(module, dict.fromkeys(SLOTS, HIGH_PRECISION)) for module in own}
        base = _base(suggestion)
    else:
        base = dict.fromkeys(SLOTS, max(elements, key=elements.__getitem__))
        linears = {
            module: {slot: slots.get(slot, slots.get("weight", base[slot])) for slot in SLOTS}
            for module, slots in own.items()
        }
    grouped = {slot_of(tensor)[0] for tensor in suggestion.grouped}
    overrides = [
        {"name": glob.escape(module), ("grouped_linear" if module in grouped else "linear"): _shortest(linear)}
        for module, linear in linears.items()
        if linear != base
    ]
    config = {"name": name, "linear": _shortest(base), "overrides": overrides}
    config |= {"gemm": "strict"} if strict else {}
    parse_recipe(config)
    return config


def _base(suggestion: Suggestion) -> dict[str, str]:
    """The quantizers that the linears with most elements have."""
    elements: Counter[tuple[str, ...]] = Counter()
    for choice in suggestion.choices:
        elements[tuple(suggestion.linears[slot_of(choice.tensor)[0]][slot] for slot in SLOTS)] += choice.elements
    return dict(zip(SLOTS, max(elements, key=elements.__getitem__), strict=True))


def _shortest(linear: Mapping[str, str]) -> str | dict[str, str]:
    """One text where all slots have the same quantizer; else slot -> quantizer."""
    texts = set(linear.values())
    return texts.pop() if len(texts) == 1 else dict(linear)


def foreign_modules(suggestion: Suggestion) -> list[str]:
    """The modules of the suggestion that the GPT of `hqsweep run`, whose states and captured/ name its modules, does
    not have."""
    tensors = (*(choice.tensor for choice in suggestion.choices), *suggestion.left_out)
    modules = list(dict.fromkeys(slot_of(tensor)[0] for tensor in tensors))
    known = _gpt_modules(modules)
    return [module for module in modules if module not in known]


def _gpt_modules(names: Iterable[str]) -> set[str]:
    """The linears of a GPT, with experts or without, that has the layers of these names."""
    matches = [re.match(r"layers\.(\d{1,4})\.", name) for name in names]
    layers = 1 + max((int(match[1]) for match in matches if match), default=0)
    dense = ModelConfig(layers=layers)
    mixed = ModelConfig(layers=layers, experts=2, top_k=1, shared_expert=True)
    shapes = [*linear_shapes(dense, 1), *linear_shapes(mixed, 1), *grouped_shapes(mixed)]
    return {name for name, *_ in shapes}
