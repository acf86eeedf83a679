"""Why a run differs from what is stored of it: another recipe, another config, another machine, or none of these."""

from collections.abc import Mapping, Sequence
from typing import Any

from hqsweep.recipe.listing import differences
from hqsweep.report.gate.baseline import EQUAL, Description, Entry

SOURCE = "columnwise_source"
Pair = tuple[Entry, Sequence[Entry]]
"""The entry of a run now, and the stored ones of the same arm, seed and point: one for each draw."""


def equal(new: Entry, stored: Sequence[Entry]) -> bool:
    """Whether the curves are those of one of the draws, bit for bit."""
    return any(new["curve_sha256"] == old["curve_sha256"] for old in stored)


def broken(new: Entry, stored: Sequence[Entry]) -> bool:
    """Whether the curves should be those of a draw, with equal config and machine, and are those of none."""
    return not equal(new, stored) and any(
        new["run_id"] == old["run_id"] and new["fingerprint"] == old["fingerprint"] for old in stored
    )


def difference(pairs: Sequence[Pair], recipe: str = "") -> str:
    """Says that all curves are equal, or what else differs where they are not: the recipe (by the text of
    recipe_changes), the config, the machine or build, or nothing."""
    apart = [(new, stored) for new, stored in pairs if not equal(new, stored)]
    if not apart:
        return EQUAL
    if any(new["run_id"] not in {old["run_id"] for old in stored} for new, stored in apart):
        return f"curves differ, and so does the {f'recipe: {recipe}' if recipe else 'config'}"
    changes = sorted({change for pair in apart for change in _machine_changes(*pair)})
    if not changes:
        return "curves differ on an equal machine and config"
    return f"curves differ, and so does {', '.join(changes)}"


def _machine_changes(new: Entry, stored: Sequence[Entry]) -> list[str]:
    """ "threads 2 -> 1", of the draw whose machine is most like this one."""
    changes = [
        [
            f"{name} {old['fingerprint'].get(name)} -> {new['fingerprint'].get(name)}"
            for name in new["fingerprint"] | old["fingerprint"]
            if new["fingerprint"].get(name) != old["fingerprint"].get(name)
        ]
        for old in stored
    ]
    return min(changes, key=len)


def recipe_changes(old: Description, new: Description) -> str:
    """How a recipe changed, in one line, "" for not at all: "linear.weight columnwise mxfp8 -> mxfp4". Slots that
    changed alike share a clause; grouped linears are named only where they changed otherwise than linears."""
    fields: dict[str, dict[str, list[str]]] = {}
    settings = []
    for row in differences(old, new):
        if row["field"] == SOURCE and None in (row["a"], row["b"]):
            continue  # of a slot that is new, or gone: its formats say so
        change = f"{_text(row['a'])} -> {_text(row['b'])}"
        if row["field"] is None:
            settings.append(f"{row['slot']} {change}")
        else:
            fields.setdefault(change, {}).setdefault(row["slot"], []).append(row["field"])
    clauses: dict[str, list[str]] = {}
    for change, slots in fields.items():
        for slot, names in slots.items():
            alike = slot.replace("grouped_linear.", "linear.")
            if alike == slot or slots.get(alike) != names:
                clauses.setdefault(f"{' and '.join(names)} {change}", []).append(slot)
    return "; ".join([*(f"{', '.join(slots)} {clause}" for clause, slots in clauses.items()), *settings])


def _text(value: Any) -> str:
    return "none" if value is None or isinstance(value, Mapping) else str(value)
