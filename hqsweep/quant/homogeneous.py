"""Quantizers of the experts of a group, which are quantized and multiplied together and so must be equal."""

from collections.abc import Sequence

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.quant.hybrid import DIRECTIONS, HybridQuantizer


def homogeneous(quantizers: Sequence[HybridQuantizer], where: str) -> HybridQuantizer:
    """The one quantizer of all experts; `where` names the module and the tensor.

    UserError, naming the first expert that differs from expert 0, and in what: the kind of quantizer, high precision,
    the family of a format, its options (tiles, elements, rounding), or the columnwise source. States of delayed scaling
    and random bits are no part of a quantizer; those are each expert's own.
    """
    first = quantizers[0]
    for expert, other in enumerate(quantizers):
        difference = _difference(first, other)
        if difference:
            raise UserError(
                f"{where} of expert {expert} differs from that of expert 0 in {difference}: {other} and {first};"
                " give all experts of a grouped linear equal quantizers"
            )
    return first


def _difference(first: HybridQuantizer, other: HybridQuantizer) -> str | None:
    if type(first) is not type(other):
        return f"the kind of quantizer ({type(other).__name__} and {type(first).__name__})"
    for direction in DIRECTIONS:
        found = _format_difference(getattr(first, direction), getattr(other, direction))
        if found:
            return f"{found} of its {direction} operand"
    if first.columnwise_source != other.columnwise_source:
        return "columnwise_source"
    return None if first == other else "its fields"


def _format_difference(first: Format, other: Format) -> str | None:
    if first.high_precision != other.high_precision:
        return "high precision"
    if type(first) is not type(other):
        return "the family"
    return None if first == other else "the options"
