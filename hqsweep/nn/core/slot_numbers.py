"""Numbers of the slots of a module's random bits: a trace takes them as inputs, where names would be guards of it."""

from collections.abc import Mapping

from hqsweep.formats import numbers_of
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole

SlotNumbers = Mapping[str, list[list[int]]]
"""Tensor of a module -> the numbers_of its slot in each of the first NUMBERED_PARTS microbatches. They are lists, for
torch.compile takes tuples of numbers for constants."""
NUMBERED_PARTS = 8
"""The number of microbatches that SlotNumbers covers."""


def slot_numbers(module_type: str, name: str) -> SlotNumbers:
    """The numbers of the slots of the module of that type and name, which has no experts."""
    slots = {tensor: str(QuantizerRole(module_type, tensor, name)) for tensor in TENSOR_TYPES[module_type]}
    parts = ["", *(f"@{part}" for part in range(1, NUMBERED_PARTS))]
    return {tensor: [numbers_of(f"{slot}{part}") for part in parts] for tensor, slot in slots.items()}
