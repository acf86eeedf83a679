"""The recipe with the least error under a budget of bits, from the rows of a probe.

Each tensor takes one quantizer. error(tensor, quantizer) is the relative error power sum (x - Qx)^2 / sum x^2, averaged
over both directions, as it enters the products of a linear; the total is the mean over all elements, and so are the
bits. Of each tensor only the lower convex hull of (bits, error) can be optimal under a budget (Lagrange); from the
cheapest quantizers on, the step that removes most error for a bit is taken as long as it fits.
"""

import glob
import heapq
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hqsweep.errors import UserError
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.recipe.sections import LinearQuantizers

SLOTS = LinearQuantizers.tensors()
EMBEDDING = re.compile(r"embed|\b(wte|wpe)\b", re.IGNORECASE)
"""Names of tables, which no linear multiplies: they are measured, and no override is for them."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One quantizer for one tensor; bits and error are for one element."""

    tensor: str
    quantizer: str
    elements: int
    bits: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A choice for every tensor, and what they come to."""

    choices: tuple[Choice, ...]
    left_out: tuple[str, ...]
    """Tensors that no quantizer fits, or with values that are not finite: they stay in bf16."""

    @property
    def bits(self) -> float:
        """Mean bits of an element."""
        return sum(c.bits * c.elements for c in self.choices) / sum(c.elements for c in self.choices)

    @property
    def sqnr_db(self) -> float:
        """-10 log10 of the mean relative error of an element; inf without any."""
        error = sum(c.error * c.elements for c in self.choices) / sum(c.elements for c in self.choices)
        return -10 * math.log10(error) if error else math.inf


def suggest(rows: Sequence[Mapping[str, Any]], bits: float) -> Suggestion:
    """The best choices whose mean bits are at most `bits`; UserError when even the cheapest ones take more."""
    options = _options(rows)
    if not options:
        raise UserError("--bits: no tensor has a format that fits and a finite error, so there is nothing to choose")
    chosen = choose(options, bits)
    names = dict.fromkeys(row["tensor"] for row in rows)
    left_out = [name for name in names if name not in options and not EMBEDDING.search(name)]
    return Suggestion(choices=tuple(chosen.values()), left_out=tuple(left_out))


def choose(options: Mapping[str, Sequence[Choice]], bits: float) -> dict[str, Choice]:
    """Tensor -> choice. At most one tensor stands beside the optimum of the relaxed problem."""
    hulls = {tensor: _hull(choices) for tensor, choices in options.items()}
    chosen = {tensor: hull[0] for tensor, hull in hulls.items()}
    left = sum((bits - choice.bits) * choice.elements for choice in chosen.values())
    if left < 0:
        elements = sum(choice.elements for choice in chosen.values())
        raise UserError(f"--bits {bits:g}: the cheapest formats take {bits - left / elements:.2f} bits an element; give"
                        " more bits, or add a smaller format to --formats")  # fmt: skip
    steps = [
        (-(a.error - b.error) / (b.bits - a.bits), tensor, rank)
        for tensor, hull in hulls.items()
        for rank, (a, b) in enumerate(pairwise(hull))
    ]
    heapq.heapify(steps)
    while steps:
        _, tensor, rank = heapq.heappop(steps)
        before, after = hulls[tensor][rank : rank + 2]
        cost = (after.bits - before.bits) * after.elements
        if chosen[tensor] is before and cost <= left:
            chosen[tensor], left = after, left - cost
    return chosen


def recipe_of(suggestion: Suggestion, name: str) -> dict[str, Any]:
    """A `recipe` config: the quantizer of most elements for all linears, overrides for modules that take others.

    MODULE.weight, MODULE.input and MODULE.grad_output are slots of MODULE, any other name is a module whose weight it
    is. A slot that was not measured takes the quantizer of its module's weight.
    """
    elements: dict[str, int] = defaultdict(int)
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for choice in suggestion.choices:
        elements[choice.quantizer] += choice.elements
        module, slot = _slot(choice.tensor)
        modules[module][slot] = choice.quantizer
    for tensor in suggestion.left_out:
        module, slot = _slot(tensor)
        modules[module][slot] = "bf16"
    base = max(elements, key=elements.__getitem__)
    overrides = []
    for module, slots in modules.items():
        other = slots.get("weight", base)
        linear = {slot: slots.get(slot, other) for slot in SLOTS}
        if set(linear.values()) != {base}:
            same = len(set(linear.values())) == 1
            overrides.append({"name": glob.escape(module), "linear": other if same else linear})
    config = {"name": name, "linear": base, "overrides": overrides}
    parse_recipe(config)
    return config


def _slot(tensor: str) -> tuple[str, str]:
    module, _, last = tensor.rpartition(".")
    return (module, last) if module and last in SLOTS else (tensor, "weight")


def _options(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Choice]]:
    """Tensor -> choices. The Hadamard transform stands on both operands of wgrad or on none, which no choice by tensor
    can promise, so that quantizers with it are measured and not chosen."""
    pairs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in (row for row in rows if not EMBEDDING.search(row["tensor"])):
        column = HybridQuantizer.parse(row["quantizer"]).columnwise
        if column == column.rowwise_form:
            pairs[row["tensor"], row["quantizer"]].append(row)
    options: dict[str, list[Choice]] = defaultdict(list)
    for (tensor, quantizer), both in pairs.items():
        errors = [_error(row) for row in both]
        if None not in errors:
            options[tensor].append(Choice(
                tensor=tensor, quantizer=quantizer, elements=math.prod(both[0]["shape"]),
                bits=sum(row["bits"] for row in both) / len(both), error=sum(errors) / len(errors),
            ))  # fmt: skip
    return options


def _error(row: Mapping[str, Any]) -> float | None:
    """rel_l2 squared; 0 for a matrix of zeros, None where there is none."""
    if row["rel_l2"] is not None:
        return row["rel_l2"] ** 2
    return 0.0 if row["note"] is None and row["amax"] == 0 else None


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull by rising bits: each step removes less error for a bit than the one before."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bits, c.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: Choice, b: Choice) -> float:
    """Error removed for a bit."""
    return (a.error - b.error) / (b.bits - a.bits)
