"""Quantizers for all tensors of a linear at once, so that hardware multiplies its operands in every GEMM (gemm=strict).

fprop multiplies the rowwise operands of input and weight. dgrad multiplies the rowwise operand of grad_output and the
columnwise one of weight. wgrad multiplies the columnwise operands of grad_output and input (recipe/pairs.py). A
checkpoint has weights alone. The other slots then get the weight's quantizer if it makes all three GEMMs strict, else
one that does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from hqsweep.formats import Format
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer
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
