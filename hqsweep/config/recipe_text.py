"""The texts of a recipe's quantizers, checked as far as names, options and sources go, without torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from hqsweep.config.format_text import QUANTIZER_FIELDS, check_source, fields_of, quantizer_texts
from hqsweep.errors import UserError

PARTS = ("linear", "grouped_linear", "dpa", "head", "embedding", "norm")
"""Parts of a recipe that are quantizers, one or one a tensor."""


def check_texts(key: str, value: Any) -> None:
    """UserError with all texts that no quantizer has, in a value of the key recipe, of a part of it, or of a quantizer
    in one. What is no quantizer passes, and so does what only the meaning of a recipe tells."""
    faults = []
    for where, check, text in _texts(key.split("."), value):
        try:
            check(text)
        except UserError as error:
            faults.append(f"{where}: {error}")
    if faults:
        raise UserError("; ".join(faults))


def _texts(path: list[str], value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, check, text) of each text below a key."""
    where = ".".join(path)
    if path[0] != "recipe" or (path[1:2] and path[1] not in PARTS):
        return
    if path[-1] in QUANTIZER_FIELDS and isinstance(value, str):
        yield where, check_source if path[-1] == QUANTIZER_FIELDS[2] else fields_of, value
    elif len(path) > 1 and isinstance(value, str):
        yield where, _check_quantizer, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts([*path, str(name)], each)


def _check_quantizer(text: str) -> None:
    row, column, _ = quantizer_texts(text)
    fields_of(row)
    if column is not None:
        fields_of(column)
