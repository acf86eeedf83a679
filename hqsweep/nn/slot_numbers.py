"""Numbers of the slots of a module's random bits: a trace takes them as inputs, where names would be guards of it."""

from collections.abc import Mapping

from hqsweep.formats import numbers_of
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole

SlotNumbers = Mapping[str, list[list[int]]]
"""Tensor of a module -> numbers_of its slot in each microbatch, the first ones. Lists, for torch.compile takes tuples
of numbers for constants."""
NUMBERED_PARTS = 8
"""Microbatches of which SlotNumbers has the numbers."""


def slot_numbers(module_type: str, name: str) -> SlotNumbers:
    """Of the module of that type and name, which has no experts."""
    slots = {tensor: str(QuantizerRole(module_type, tensor, name)) for tensor in TENSOR_TYPES[module_type]}
    parts = ["", *(f"@{part}" for part in range(1, NUMBERED_PARTS))]
    return {tensor: [numbers_of(f"{slot}{part}") for part in parts] for tensor, slot in slots.items()}
