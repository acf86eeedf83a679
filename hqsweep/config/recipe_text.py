"""The texts of a recipe's quantizers, checked without torch: names, options and sources, and the pairs of formats that
meet in a product.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hqsweep.errors import UserError
from hqsweep.formats.spec import (
    QUANTIZER_FIELDS,
    FormatText,
    check_source,
    directions,
    fields_of,
    quantizer_texts,
)
from hqsweep.recipe.pairs import GEMMS, MODULE_GEMMS, pair_fault
from hqsweep.recipe.roles import IN_HIGH_PRECISION, TENSOR_TYPES

PARTS = ("linear", "grouped_linear", "dpa", "head", "embedding", "norm")
"""The parts of a recipe that are quantizers: one for the part, or one for each tensor."""


def check_texts(key: str, value: Any) -> None:
    """Raise UserError with all texts that name no quantizer, in the value of the key recipe, a part, or a quantizer.

    A value of another kind passes, as do faults in the meaning of a recipe.
    """
    faults = []
    for where, check, text in _texts(key.split("."), value):
        try:
            check(text)
        except UserError as error:
            faults.append(f"{where}: {error}")
    if faults:
        raise UserError("; ".join(faults))


def _texts(path: list[str], value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, check, text) for each text below a key."""
    where = ".".join(path)
    if path[0] != "recipe" or (path[1:2] and path[1] not in PARTS):
        return
    if path[-1] in QUANTIZER_FIELDS and isinstance(value, str):
        yield where, check_source if path[-1] == QUANTIZER_FIELDS[2] else fields_of, value
    elif len(path) > 1 and isinstance(value, str):
        yield where, _check_quantizer, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts([*path, str(name)], part)


def _check_quantizer(text: str) -> None:
    row, column, _ = quantizer_texts(text)
    fields_of(row)
    if column is not None:
        fields_of(column)


def check_pairs(recipe: Any, parts: Sequence[str]) -> None:
    """Raise UserError with all products of these parts whose operands cannot meet, for any sizes.

    parts: linear, grouped_linear, dpa, head. The caller has modules that follow these parts. Overrides, schedules and
    Python factories are not read. A part that one of them may change passes here; recipe.validate, which knows the
    modules, checks it.
    """
    if not isinstance(recipe, Mapping) or recipe.get("qfactory") or recipe.get("schedule"):
        return
    overrides = [entry for entry in recipe.get("overrides") or () if isinstance(entry, Mapping)]
    overridden = {key for entry in overrides for key in entry}
    mode, faults = str(recipe.get("gemm") or "exact"), []
    for part in parts:
        module = "dpa" if part == "dpa" else "linear"
        slots = {} if overridden & {part, module} else part_quantizers(recipe, part)
        if slots.keys() >= set(TENSOR_TYPES[module]):
            faults += [f"recipe.{part} {fault}" for fault in _pair_faults(slots, MODULE_GEMMS.get(part, GEMMS), mode)]
    if faults:
        raise UserError("; ".join(faults))


def part_quantizers(recipe: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return tensor -> quantizer (text or mapping) of a part of a recipe: as stated, or by default.

    {} if the value is no part.
    """
    tensors = TENSOR_TYPES.get(part, TENSOR_TYPES["linear"])
    default: dict[str, Any] = {}
    if part == "grouped_linear":
        default = part_quantizers(recipe, "linear")
    elif part in IN_HIGH_PRECISION:
        default = dict.fromkeys(tensors, IN_HIGH_PRECISION[part])
    value = recipe.get(part)
    if value is None:
        return default
    if isinstance(value, Mapping) and "rowwise" not in value:
        return default | {tensor: quantizer for tensor, quantizer in value.items() if quantizer is not None}
    return dict.fromkeys(tensors, value) if isinstance(value, Mapping | str) else {}


def _pair_faults(slots: Mapping[str, Any], gemms: Mapping[str, Any], mode: str) -> Iterator[str]:
    """The faults of the products of a module with these quantizers."""
    try:
        formats = {tensor: _formats(value) for tensor, value in slots.items()}
    except UserError:  # no quantizer, which is told by who parses it
        return
    for gemm, operands in gemms.items():
        meeting = tuple(formats[tensor][direction] for tensor, direction in operands)
        spelled = [f"{t} {d} {f}" for (t, d), f in zip(operands, meeting, strict=True)]
        if fault := pair_fault(spelled, meeting, mode):
            yield f"{gemm}: {fault}"


def _formats(value: Any) -> dict[str, FormatText]:
    """Direction -> format of a quantizer. UserError where the value is none; quant.hybrid says more of it."""
    row, column = map(FormatText.parse, directions(value)[:2])
    return {"rowwise": row, "columnwise": column}
