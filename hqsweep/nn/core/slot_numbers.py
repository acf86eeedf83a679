"""Slot numbers for a module's random bits. A trace takes them as inputs; names would be guards of the trace."""

from collections.abc import Mapping

from hqsweep.formats import numbers_of
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole

SlotNumbers = Mapping[str, list[list[int]]]
"""Tensor of a module -> numbers_of() its slot, for each of the first NUMBERED_PARTS microbatches.

They are lists, because torch.compile treats tuples of numbers as constants.
"""
NUMBERED_PARTS = 8
"""The number of microbatches that SlotNumbers covers."""


def slot_numbers(module_type: str, name: str) -> SlotNumbers:
    """Return the slot numbers of a module without experts."""
    slots = {tensor: str(QuantizerRole(module_type, tensor, name)) for tensor in TENSOR_TYPES[module_type]}
    parts = ["", *(f"@{part}" for part in range(1, NUMBERED_PARTS))]
    return {tensor: [numbers_of(f"{slot}{part}") for part in parts] for tensor, slot in slots.items()}
