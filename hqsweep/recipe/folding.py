"""Fold slots with equal rows into one line."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def folded(rows: Iterable[Row], fields: Sequence[str], every: Collection[str]) -> list[dict[str, Any]]:
    """Return rows with equal `fields` folded into one row, whose slot is `together` of their names, in order.

    Overrides and changes stay separate. every: the names of all slots of the recipe.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        place = row["slot"].rpartition(".")[0].rpartition(".")[0]
        groups.setdefault((place, *(row[field] for field in fields)), []).append(row["slot"])
    return [
        {"slot": together(names, every), **dict(zip(fields, values, strict=True))}
        for (_, *values), names in groups.items()
    ]


def of_both_directions(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows of listing.diff, with both directions of a slot folded into one row if they change alike."""
    fields: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        fields.setdefault((row["slot"], row["a"], row["b"]), []).append(row["field"])
    return [
        {"slot": slot, "field": None if names == [None] else ", ".join(names), "a": a, "b": b}
        for (slot, a, b), names in fields.items()
    ]


def together(names: Collection[str], every: Collection[str]) -> str:
    """Return a text such as "input, weight of linear, grouped_linear; dpa".

    A part whose slots in `every` are all in `names` is named alone. Parts with the same tensors are listed together. A
    single slot, and a name that is not a slot, is unchanged.
    """
    tensors = {part: _tensors(part, names) for part in dict.fromkeys(name.rpartition(".")[0] for name in names)}
    parts: dict[tuple[str, bool], list[str]] = {}
    for part, had in tensors.items():
        whole = part and had == _tensors(part, every)
        parts.setdefault(("" if whole else ", ".join(had), bool(part)), []).append(part)
    return "; ".join(_text(had, owners) for (had, _), owners in parts.items())


def _text(tensors: str, parts: Sequence[str]) -> str:
    if not any(parts):
        return tensors
    if len(parts) == 1 and "," not in tensors:
        return ".".join(filter(None, [parts[0], tensors]))
    return f"{tensors} of {', '.join(parts)}" if tensors else ", ".join(parts)


def _tensors(part: str, names: Iterable[str]) -> list[str]:
    return [tensor for owner, _, tensor in (name.rpartition(".") for name in names) if owner == part]
