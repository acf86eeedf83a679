"""The recipe with the least error under a budget of bits, from the rows of a probe.

error(tensor, quantizer) is the relative error power sum (x - Qx)^2 / sum x^2, averaged over both directions. Rows with
`damage` (sensitivity.py) have that instead, for one element. The total error and the total bits are means over all
elements.

A choice is for a linear with all of its tensors, so that hardware has its three GEMMs (strict pairs), or
for one tensor. Under a budget, only choices on the lower convex hull of (bits, error) can be optimal (Lagrange). The
search begins with the cheapest quantizers. It takes the step that removes most error for a bit while the budget allows.

fprop multiplies the rowwise operands of input and weight. dgrad multiplies the rowwise operand of grad_output and the
columnwise one of weight. wgrad multiplies the columnwise operands of grad_output and input (recipe/pairs.py). A
checkpoint has weights alone. The other slots then get the weight's quantizer if it makes all three GEMMs strict, else
one that does.
"""

import glob
import heapq
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from typing import Any, Literal, TypeVar

from hqsweep.config.job import grouped_shapes, linear_shapes
from hqsweep.config.model import ModelConfig
from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
from hqsweep.recipe.argument import parse_recipe
from hqsweep.recipe.pairs import GEMMS, hardware_fault, mathematical_fault
from hqsweep.recipe.sections import LinearQuantizers

SLOTS = LinearQuantizers.tensors()
Completion = Callable[[tuple[tuple[str, str], ...]], Mapping[str, str] | None]
"""Quantizers of the measured slots, ((slot, quantizer), ...) -> quantizers of all slots, or None."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One quantizer for one tensor. bits and error are for one element."""

    tensor: str
    quantizer: str
    elements: int
    bits: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Together:
    """One choice for each measured tensor of a linear. bits and error are for one element of all of them."""

    parts: tuple[Choice, ...]
    linear: Mapping[str, str]
    """Slot -> quantizer, for all three slots."""
    elements: int
    bits: float
    error: float


def slot_of(tensor: str) -> tuple[str, str]:
    """(module, slot) of a tensor's name.

    MODULE.weight, MODULE.input and MODULE.grad_output are slots of MODULE; any other name is a module, and means its
    weight.
    """
    module, _, last = tensor.rpartition(".")
    return (module, last) if module and last in SLOTS else (tensor, "weight")


def together(options: Mapping[str, Sequence[Choice]], tensors: Iterable[str]) -> dict[str, list[Together]]:
    """Linear -> its strict choices. options: choices by tensor. tensors: all that were measured.

    Left out are linears without strict choices, or with a tensor without options.
    """
    quantizers = dict.fromkeys(choice.quantizer for choices in options.values() for choice in choices)
    modules: dict[str, list[str]] = {}
    for tensor in tensors:
        modules.setdefault(slot_of(tensor)[0], []).append(tensor)
    complete = _completion(tuple(quantizers))
    by_module = {
        module: list(_of_linear([options[tensor] for tensor in own], complete))
        for module, own in modules.items()
        if all(tensor in options for tensor in own)
    }
    return {module: choices for module, choices in by_module.items() if choices}


def _of_linear(choices: Sequence[Sequence[Choice]], complete: Completion) -> Iterator[Together]:
    for parts in product(*choices):
        linear = complete(tuple((slot_of(part.tensor)[1], part.quantizer) for part in parts))
        if linear is None:
            continue
        elements = sum(part.elements for part in parts)
        yield Together(
            parts=parts,
            linear=linear,
            elements=elements,
            bits=sum(part.bits * part.elements for part in parts) / elements,
            error=sum(part.error * part.elements for part in parts) / elements,
        )


def _completion(texts: tuple[str, ...]) -> Completion:
    """The Completion with quantizers of the formats in `texts`. It gives None where none of them makes all GEMMs
    strict."""
    parsed = [HybridQuantizer.parse(text) for text in texts]
    formats = dict.fromkeys(getattr(quantizer, direction) for quantizer in parsed for direction in DIRECTIONS)
    rows, columns = [f for f in formats if not f.rht], [f for f in formats if not f.rowwise_only]
    pairs = [HybridQuantizer(row, column) for row in rows for column in columns]

    @cache
    def complete(measured: tuple[tuple[str, str], ...]) -> Mapping[str, str] | None:
        known = {slot: HybridQuantizer.parse(text) for slot, text in measured}
        first = [known["weight"]] if "weight" in known else []
        candidates = [[known[slot]] if slot in known else [*first, *parsed, *pairs] for slot in SLOTS]
        for quantizers in product(*candidates):
            linear = dict(zip(SLOTS, quantizers, strict=True))
            if is_strict(linear):
                return {slot: str(quantizer) for slot, quantizer in linear.items()}
        return None

    return complete


def is_strict(linear: Mapping[str, HybridQuantizer]) -> bool:
    """Whether hardware multiplies the operands of all three GEMMs. linear: slot -> quantizer."""
    return not any(
        _fault(*(getattr(linear[tensor], direction) for tensor, direction in operands)) for operands in GEMMS.values()
    )


@cache
def _fault(a: Format, b: Format) -> str | None:
    return mathematical_fault(a, b) or hardware_fault(a, b)


Pairs = Literal["strict", "any"]
Option = TypeVar("Option", Choice, Together)
NO_LINEAR = re.compile(r"embed|\b(wte|wpe|head|lm_head|router)\b", re.IGNORECASE)
"""Names of tables, routers and the last linear. A recipe's `linear` does not apply to them, so they are measured but
get no quantizer."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A choice for every tensor, with its total bits and error."""

    choices: tuple[Choice, ...]
    left_out: tuple[str, ...]
    """Tensors that stay in bf16: no quantizer fits, values are not finite, or no strict pair exists."""
    linears: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For strict pairs: linear -> the quantizer of each of its three slots."""
    grouped: frozenset[str] = frozenset()
    """Tensors with a leading axis, which belong to grouped linears."""

    @property
    def bits(self) -> float:
        """The mean bits of an element."""
        return sum(c.bits * c.elements for c in self.choices) / sum(c.elements for c in self.choices)

    @property
    def sqnr_db(self) -> float:
        """-10 log10 of the mean relative error of an element; inf without elements."""
        error = sum(c.error * c.elements for c in self.choices) / sum(c.elements for c in self.choices)
        return -10 * math.log10(error) if error else math.inf

    @property
    def damage(self) -> float:
        """The sum of all errors: the predicted rise of the loss in nats, where rows have `damage`."""
        return sum(c.error * c.elements for c in self.choices)


def suggest(
    rows: Sequence[Mapping[str, Any]], bits: float, pairs: Pairs = "strict", *, seed: int | None = None
) -> Suggestion:
    """The choices with the least error whose mean bits are at most `bits`.

    pairs "strict": hardware multiplies the operands of every linear, which share one kind of scaling in each GEMM.
    seed: spend the bits at random instead, on the same choices.

    Raises:
        UserError: even the cheapest choices take more bits, or nothing can be chosen.
    """
    options = _options(rows)
    if not options:
        raise UserError("--bits: no tensor has a format that fits and a finite error, so there is nothing to choose")
    names = [name for name in dict.fromkeys(row["tensor"] for row in rows) if not NO_LINEAR.search(name)]
    grouped = frozenset(row["tensor"] for row in rows if len(row["shape"]) > 2)
    if pairs == "any":
        chosen = tuple(choose(options, bits, seed).values())
        return Suggestion(choices=chosen, left_out=tuple([n for n in names if n not in options]), grouped=grouped)
    joint = together(options, names)
    if not joint:
        raise UserError(
            "--bits: no linear has formats in which hardware multiplies all of its tensors; add a format to --formats,"
            " or give --pairs any for what gemm=exact can emulate"
        )
    best = choose(joint, bits, seed)
    parts = tuple(part for choice in best.values() for part in choice.parts)
    taken = {part.tensor for part in parts}
    return Suggestion(
        choices=parts,
        left_out=tuple([name for name in names if name not in taken]),
        linears={module: choice.linear for module, choice in best.items()},
        grouped=grouped,
    )


def choose(options: Mapping[str, Sequence[Option]], bits: float, seed: int | None = None) -> dict[str, Option]:
    """Name -> choice. At most one name differs from the optimum of the relaxed problem. seed: take steps at random."""
    hulls = {name: _hull(choices) for name, choices in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = sum((bits - choice.bits) * choice.elements for choice in chosen.values())
    if left < 0:
        elements = sum(choice.elements for choice in chosen.values())
        raise UserError(f"--bits {bits:g}: the cheapest formats take {bits - left / elements:.2f} bits an element; give"
                        " more bits, or add a smaller format to --formats")  # fmt: skip
    if seed is not None:
        return _at_random(hulls, chosen, left, random.Random(seed))
    steps = [
        (-(a.error - b.error) / (b.bits - a.bits), name, rank)
        for name, hull in hulls.items()
        for rank, (a, b) in enumerate(pairwise(hull))
    ]
    heapq.heapify(steps)
    while steps:
        _, name, rank = heapq.heappop(steps)
        before, after = hulls[name][rank : rank + 2]
        cost = (after.bits - before.bits) * after.elements
        if chosen[name] is before and cost <= left:
            chosen[name], left = after, left - cost
    return chosen


def _at_random(
    hulls: Mapping[str, Sequence[Option]], chosen: dict[str, Option], left: float, draw: random.Random
) -> dict[str, Option]:
    """Take steps along the hulls of names drawn at random, until no step is within the bits that are left."""
    rank, open_names = dict.fromkeys(hulls, 0), sorted(hulls)
    while open_names:
        name = draw.choice(open_names)
        before, after = chosen[name], next(iter(hulls[name][rank[name] + 1 :]), None)
        cost = math.inf if after is None else (after.bits - before.bits) * after.elements
        if cost > left:
            open_names.remove(name)
        else:
            chosen[name], left, rank[name] = after, left - cost, rank[name] + 1
    return chosen


def _options(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Choice]]:
    """Tensor -> choices. Quantizers with the Hadamard transform are measured but not chosen.

    Both operands of wgrad must have the transform, or neither, which a choice by tensor cannot promise.
    """
    pairs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in (row for row in rows if not NO_LINEAR.search(row["tensor"])):
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
    """damage for one element, or rel_l2 squared; 0 for a matrix of zeros, None without a measurement."""
    if row.get("damage") is not None:
        return row["damage"] / math.prod(row["shape"])
    if row["rel_l2"] is not None:
        return row["rel_l2"] ** 2
    return 0.0 if row["note"] is None and row["amax"] == 0 else None


def _hull(choices: Sequence[Option]) -> list[Option]:
    """The lower convex hull, by rising bits: each step removes less error for a bit than the step before."""
    hull: list[Option] = []
    for choice in sorted(choices, key=lambda c: (c.bits, c.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: Option, b: Option) -> float:
    """The error removed for a bit."""
    return (a.error - b.error) / (b.bits - a.bits)


HIGH_PRECISION = "bf16"


def recipe_of(suggestion: Suggestion, name: str) -> dict[str, Any]:
    """A `recipe` config: quantizers for all linears, and overrides for modules with others.

    A slot that was not measured takes the quantizer of its module's weight, or for strict pairs one that makes all
    three GEMMs strict. For strict pairs the recipe has gemm: strict, which refuses other formats later.
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
    """The quantizers of the linears with most elements."""
    elements: Counter[tuple[str, ...]] = Counter()
    for choice in suggestion.choices:
        elements[tuple(suggestion.linears[slot_of(choice.tensor)[0]][slot] for slot in SLOTS)] += choice.elements
    return dict(zip(SLOTS, max(elements, key=elements.__getitem__), strict=True))


def _shortest(linear: Mapping[str, str]) -> str | dict[str, str]:
    """One text where all slots have the same quantizer; else slot -> quantizer."""
    texts = set(linear.values())
    return texts.pop() if len(texts) == 1 else dict(linear)


def foreign_modules(suggestion: Suggestion) -> list[str]:
    """The modules of the suggestion that the GPT of `hqsweep run` does not have.

    Its states and files in captured/ name its modules.
    """
    tensors = (*(choice.tensor for choice in suggestion.choices), *suggestion.left_out)
    modules = list(dict.fromkeys(slot_of(tensor)[0] for tensor in tensors))
    known = _gpt_modules(modules)
    return [module for module in modules if module not in known]


def _gpt_modules(names: Iterable[str]) -> set[str]:
    """The linears of a GPT, with or without experts, whose layers have these names."""
    matches = [re.match(r"layers\.(\d{1,4})\.", name) for name in names]
    layers = 1 + max((int(match[1]) for match in matches if match), default=0)
    dense = ModelConfig(layers=layers)
    mixed = ModelConfig(layers=layers, experts=2, top_k=1, shared_expert=True)
    shapes = [*linear_shapes(dense, 1), *linear_shapes(mixed, 1), *grouped_shapes(mixed)]
    return {name for name, *_ in shapes}
