"""F/D/W: the section of a linear written by its products, as TransformerEngine's documentation writes recipes.

"nvfp4/mxfp8/bf16" gives fprop, dgrad and wgrad one format each, for both operands; LEFT*RIGHT gives each operand its
own, in the order of pairs.GEMMS: input*weight, grad_output*weight, grad_output*input. It is the value of `gemms` in a
section, in place of input, weight and grad_output, and composes to these: F is read rowwise from input and weight, D
rowwise from grad_output and columnwise from weight, W columnwise from grad_output and input. Each columnwise operand is
made from the original tensor, so a section with another source has no such text.
"""

from collections.abc import Mapping
from typing import Any

from hqsweep.errors import UserError
from hqsweep.formats.spec import NAMES, SOURCES, directions, fields_of, split_projection, words_of
from hqsweep.recipe.pairs import GEMMS
from hqsweep.recipe.roles import TENSOR_TYPES

KEY = "gemms"
"""The key of a section whose value is F/D/W."""
TENSORS = TENSOR_TYPES["linear"]


def section_texts(text: object) -> dict[str, str]:
    """Return tensor -> ROW|COL of F/D/W. UserError for another text, with all of its unknown formats."""
    products = text.split("/") if isinstance(text, str) else []
    operands = [product.split("*") for product in products]
    if len(products) != len(GEMMS) or any(len(formats) > 2 for formats in operands):
        raise UserError(
            f"got {text!r}; it takes F/D/W, a format for each of {', '.join(GEMMS)}, such as 'nvfp4/mxfp8/bf16', or"
            " LEFT*RIGHT for the two operands of one"
        )
    slots, faults = {}, []
    for (gemm, read), formats in zip(GEMMS.items(), operands, strict=True):
        for slot, format in zip(read, formats * (3 - len(formats)), strict=True):
            slots[slot] = format.strip()
            try:
                fields_of(format)
            except UserError as error:
                faults.append(f"{gemm}: {error}")
    if faults:
        raise UserError("; ".join(dict.fromkeys(faults)))
    return {tensor: f"{slots[tensor, 'rowwise']}|{slots[tensor, 'columnwise']}" for tensor in TENSORS}


def expanded(section: Any, where: str) -> Any:
    """Return a section's mapping with input, weight and grad_output in place of gemms; any other value as it is.

    where: starts the error. UserError as section_texts() raises it, and for a mapping with both.
    """
    if not isinstance(section, Mapping) or KEY not in section:
        return section
    others = {key: value for key, value in section.items() if key != KEY and value is not None}
    if section[KEY] is None:
        return others
    if others:
        raise UserError(
            f"{where}: {KEY} says the formats of {', '.join(TENSORS)}; leave out {KEY}, or"
            f" {', '.join(map(str, others))}"
        )
    try:
        return section_texts(section[KEY])
    except UserError as error:
        raise UserError(f"{where}.{KEY}: {error}") from None


def gemms_text(section: Mapping[str, str]) -> str | None:
    """Return F/D/W of a section, tensor -> quantizer's text; None if a columnwise operand has another source, and for a
    projected weight."""
    if any(split_projection(section[tensor])[0] for tensor in TENSORS):
        return None
    slots: dict[tuple[str, str], str] = {}
    for tensor in TENSORS:
        row, column, source = directions(section[tensor])
        if source != SOURCES[0]:
            return None
        slots |= {(tensor, "rowwise"): row, (tensor, "columnwise"): column}
    products = [dict.fromkeys(slots[operand] for operand in operands) for operands in GEMMS.values()]
    return "/".join("*".join(formats) for formats in products)


def is_gemms_text(text: str) -> bool:
    """Return whether a text has three products, one of them with a format's name, so that it is no path."""
    operands = [operand for product in text.split("/") for operand in product.split("*")]
    return text.count("/") == 2 and any(words_of(operand)[0] in NAMES for operand in operands)
