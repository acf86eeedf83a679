"""A recipe as rows, one per slot, folded where slots have equal rows; and the differences between two recipes."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hqsweep.quant.hybrid import DIRECTIONS, FIELDS, HybridQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.gemms import gemms_text
from hqsweep.recipe.pairs import GEMMS, MODULE_GEMMS
from hqsweep.recipe.roles import HEAD, TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sectioned import SECTIONS, Recipe
from hqsweep.recipe.sections import HIGH_PRECISION, Section

PROJECTION = "projection"
ALL_FIELDS = (*FIELDS, PROJECTION)
LINEARS = ("linear", "grouped_linear")
PARTS = (*SECTIONS, HEAD, "embedding", "norm")


@dataclass(frozen=True)
class Slot:
    """A tensor of a part of a recipe, with its quantizer. stage: 0 before the first change of a schedule."""

    part: str
    tensor: str
    quantizer: HybridQuantizer
    stage: int = 0

    @property
    def name(self) -> str:
        """The name in a config, "linear.input", prefixed by the schedule's stage if there is one."""
        return (f"schedule[{self.stage - 1}]." if self.stage else "") + f"{self.part}.{self.tensor}"

    def row(self) -> dict[str, Any]:
        """Return slot, rowwise, columnwise and columnwise_source, the GEMMs that read each direction, and the
        projection or None."""
        module_type = self.part.rpartition(".")[2]
        gemms = {} if module_type in ("embedding", "norm") else MODULE_GEMMS.get(module_type, GEMMS)
        reads = {
            f"{direction}_reads": [gemm for gemm, operands in gemms.items() if (self.tensor, direction) in operands]
            for direction in DIRECTIONS
        }
        projection = getattr(self.quantizer, PROJECTION, None)
        fields = {name: str(getattr(self.quantizer, name)) for name in FIELDS}
        return {"slot": self.name, **fields, **reads, PROJECTION: None if projection is None else str(projection)}


def slots(recipe: AnyRecipe) -> Iterator[Slot]:
    """Yield every slot of a recipe, its overrides and its schedule.

    A Python factory is asked with nameless modules; a factory that was not imported has no slots.
    """
    yield from _one(recipe, 0)
    for stage, change in enumerate(recipe.schedule, start=1):
        yield from _one(change.recipe, stage)


def by_gemms(recipe: AnyRecipe) -> dict[str, str]:
    """Return part -> F/D/W (hqsweep.recipe.gemms) for each part that can be so written: linear, its overrides and
    stages; grouped_linear and the head, where they differ from a recipe that mentions linear alone."""
    sections: dict[str, dict[str, str]] = {}
    for slot in slots(recipe):
        part, _, tensor = slot.name.rpartition(".")
        if tensor in TENSOR_TYPES["linear"] and slot.part.rpartition(".")[2] in (*LINEARS, HEAD):
            sections.setdefault(part, {})[tensor] = str(slot.quantizer)
    return {
        part: text
        for part, section in sections.items()
        if section != _usual(part, sections) and (text := gemms_text(section)) is not None
    }


def _usual(part: str, sections: Mapping[str, dict[str, str]]) -> dict[str, str] | None:
    """Return the texts of a part that a recipe does not mention; None for linear, which all recipes do."""
    owner, _, name = part.rpartition(".")
    if name == HEAD:
        return HIGH_PRECISION[HEAD].texts()
    return sections.get(f"{owner}.linear".lstrip(".")) if name == "grouped_linear" else None


def described(recipe: AnyRecipe) -> dict[str, Any]:
    """Return a recipe as plain data for JSON.

    It maps slots to {rowwise, columnwise, columnwise_source} as text, with projection where there is one, and key paths
    to other settings: gemm, factory, fp8_dpa, and the targets of overrides and changes.
    """
    rows = [slot.row() for slot in slots(recipe)]
    texts = {row["slot"]: {name: row[name] for name in ALL_FIELDS if row[name] is not None} for row in rows}
    return texts | _settings(recipe)


def parts(recipe: AnyRecipe) -> dict[str, str]:
    """Return part -> its quantizers in short form ("mxfp8", or "input nvfp4|mxfp8, weight mxfp8, ...").

    It covers `linear`, and each part that differs from a recipe with `linear` alone: sections, overrides, gemm,
    schedule, a Python factory.
    """
    if isinstance(recipe, CustomRecipe):
        told = {"qfactory": recipe.path} | ({"fp8_dpa": "true"} if recipe.fp8_dpa else {})
    else:
        usual = {"grouped_linear": recipe.linear} | HIGH_PRECISION
        told = {part: _short(own) for part in PARTS if (own := getattr(recipe, part)) != usual.get(part)}
        for override in recipe.overrides:
            sections = {part: getattr(override, part) for part in SECTIONS}
            sections |= {"grouped_linear": None} if sections["grouped_linear"] == sections["linear"] else {}
            text = "; ".join(f"{part} {_short(section)}" for part, section in sections.items() if section)
            told[f"overrides {override}"] = text
    told |= {"gemm": recipe.gemm} if recipe.gemm != "exact" else {}
    told |= {"comm": str(comm)} if (comm := getattr(recipe, "comm", None)) else {}
    before = recipe
    for change in recipe.schedule:
        old, new = parts(replace(before, schedule=())), parts(change.recipe)
        changed = [f"{part} {text}" for part, text in new.items() if old.get(part) != text]
        changed += [f"no {part}" for part in old if part not in new]
        told[f"schedule {change.when}"] = "; ".join(changed) or "nothing"
        before = change.recipe
    return told


def _short(section: Section | HybridQuantizer) -> str:
    if isinstance(section, HybridQuantizer):
        return str(section)
    texts = section.texts()
    alike = len(set(texts.values())) == 1
    return next(iter(texts.values())) if alike else ", ".join(f"{tensor} {text}" for tensor, text in texts.items())


def diff(a: AnyRecipe, b: AnyRecipe) -> list[dict[str, Any]]:
    """Return the `differences` of two recipes' descriptions."""
    return differences(described(a), described(b))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows {slot, field, a, b} for differing entries of two descriptions; None for a missing one, [] if equal.

    Settings that are not slots have the field None.
    """
    rows = []
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name), b.get(name)
        if isinstance(one or other, dict):
            fields = [(field, *((described or {}).get(field) for described in (one, other))) for field in ALL_FIELDS]
        else:
            fields = [(None, one, other)]
        rows += [{"slot": name, "field": field, "a": x, "b": y} for field, x, y in fields if x != y]
    return sorted(rows, key=lambda row: row["field"] is None)


def _one(recipe: AnyRecipe, stage: int) -> Iterator[Slot]:
    if isinstance(recipe, CustomRecipe):
        if recipe.is_name:
            return
        for part in MODULE_GEMMS:
            roles = {tensor: QuantizerRole(part, tensor, "") for tensor in TENSOR_TYPES[part]}
            quantizers = recipe.resolve(roles.values())
            yield from (Slot(part, tensor, quantizers[role], stage) for tensor, role in roles.items())
        return
    for part in PARTS:
        section = getattr(recipe, part)
        if isinstance(section, HybridQuantizer):
            yield Slot(part, "weight", section, stage)
        else:
            yield from (Slot(part, tensor, getattr(section, tensor), stage) for tensor in section.tensors())
    for index, override in enumerate(recipe.overrides):
        for part in SECTIONS:
            if section := getattr(override, part):
                where = f"overrides[{index}].{part}"
                yield from (Slot(where, tensor, getattr(section, tensor), stage) for tensor in section.tensors())


def _settings(recipe: AnyRecipe) -> dict[str, Any]:
    """Return key path -> value for the parts of a recipe that are not quantizers."""
    settings: dict[str, Any] = {}
    for stage, variant in enumerate((recipe, *(change.recipe for change in recipe.schedule))):
        where = f"schedule[{stage - 1}]." if stage else ""
        if stage:
            settings[f"{where}at"] = recipe.schedule[stage - 1].at
        settings[f"{where}gemm"] = variant.gemm
        if isinstance(variant, Recipe):
            settings |= {f"{where}overrides[{i}]": str(override) for i, override in enumerate(variant.overrides)}
            settings |= {f"{where}comm": str(variant.comm)} if variant.comm else {}
        else:
            settings |= {f"{where}qfactory": variant.path, f"{where}fp8_dpa": variant.fp8_dpa}
    return settings


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
