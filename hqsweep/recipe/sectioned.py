"""Recipe: a quantizer for every slot of a model, as a frozen value that is checked before anything runs.

Overrides choose modules by a glob on names, and by layers: by index or from either end.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal

from hqsweep.errors import UserError, nearest
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe, Change
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.roles import HEAD, TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import (
    HIGH_PRECISION,
    Comm,
    DpaQuantizers,
    Faults,
    LinearQuantizers,
    Section,
    parse_unprojected,
)

_ENDS = re.compile(r"(first|last)\(\s*([0-9.]+)\s*\)")
_TAKES = (
    "it takes an index, a list of indices (negative ones count from the end), first(N) or last(N), N being a number of"
    " layers or a fraction below 1"
)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A choice of layers: indices, or the first or last `count` layers. A fraction is rounded up to at least one
    layer."""

    end: Literal["first", "last"] | None = None
    count: Fraction = Fraction(0)
    indices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, value: object, where: str) -> "Layers":
        """Return the choice of 11, [0, -1], "first(2)" or "last(0.15)". where: starts the error."""
        indices = [value] if isinstance(value, int) else value
        if isinstance(indices, list | tuple) and indices and all(type(i) is int for i in indices):
            return cls(indices=tuple(sorted(set(indices))))
        match = _ENDS.fullmatch(value.strip()) if isinstance(value, str) else None
        count = _count(match[2]) if match else None
        if count is None:
            raise UserError(f"{where}: got {value!r}; {_TAKES}")
        return cls(end=match[1], count=count)

    def to_config(self) -> str | list[int]:
        """Return the value that parse() takes."""
        return str(self) if self.end else list(self.indices)

    def __str__(self) -> str:
        count = int(self.count) if self.count.denominator == 1 else float(self.count)
        return f"{self.end}({count})" if self.end else ", ".join(map(str, self.indices))

    @property
    def relative(self) -> bool:
        """Whether the choice depends on the number of layers."""
        return self.end is not None or any(i < 0 for i in self.indices)

    def of(self, layers: Sequence[int]) -> set[int]:
        """Return the chosen layers of a model. layers: its layers in order."""
        if self.end is None:
            return {i if i >= 0 else layers[i] for i in self.indices if i >= 0 or -i <= len(layers)} & set(layers)
        count = int(self.count) if self.count >= 1 else math.ceil(self.count * len(layers))
        return set(layers[:count] if self.end == "first" else layers[max(0, len(layers) - count) :])


def layers_of(roles: Sequence[QuantizerRole]) -> list[int]:
    """Return the layer indices of the roles' modules, in order."""
    return sorted({role.layer for role in roles if role.layer is not None})


def _count(text: str) -> Fraction | None:
    """Return the number in a text if it is positive, and whole when it is 1 or more; else None."""
    try:
        count = Fraction(text)
    except ValueError:
        return None
    return count if 0 < count < 1 or (count >= 1 and count.denominator == 1) else None


GEMM_MODES = ("exact", "strict", "native")
SECTIONS = {"linear": LinearQuantizers, "grouped_linear": LinearQuantizers, "dpa": DpaQuantizers}
KEYS = ("name", "linear", "grouped_linear", "dpa", "head", "embedding", "norm", "overrides", "gemm", "comm")


@dataclass(frozen=True, kw_only=True)
class Override:
    """Other quantizers for modules that match both the glob and the layers. A section that is None changes nothing."""

    name: str = "*"
    layers: Layers | None = None
    linear: LinearQuantizers | None = None
    grouped_linear: LinearQuantizers | None = None
    dpa: DpaQuantizers | None = None

    @classmethod
    def parse(cls, value: object, where: str) -> "Override":
        """Return the override of {name and/or layers, linear and/or grouped_linear and/or dpa}.

        grouped_linear defaults to linear.
        """
        takes = f"it takes name (a glob), layers, or both, and at least one of {', '.join(SECTIONS)}"
        fields = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
        unknown = [key for key in fields if key not in ("name", "layers", *SECTIONS)]
        if unknown or not fields.keys() & {"name", "layers"} or not fields.keys() & SECTIONS.keys():
            hint = nearest(unknown[0], ("name", "layers", *SECTIONS)) if unknown else ""
            raise UserError(f"{where} is {value!r}; {takes}{hint}")
        faults = Faults()
        sections = {k: faults.take(s.parse, fields[k], f"{where}.{k}") for k, s in SECTIONS.items() if k in fields}
        if "layers" in fields:
            sections["layers"] = faults.take(Layers.parse, fields["layers"], f"{where}.layers")
        faults.raise_any()
        return cls(name=str(fields.get("name", "*")), **{"grouped_linear": sections.get("linear"), **sections})

    def to_config(self) -> dict[str, Any]:
        """Return the mapping that parse() takes, with every given section."""
        layers = {} if self.layers is None else {"layers": self.layers.to_config()}
        sections = {key: section for key in SECTIONS if (section := getattr(self, key)) is not None}
        return {"name": self.name, **layers} | {key: section.texts() for key, section in sections.items()}

    def matches(self, role: QuantizerRole, layers: Sequence[int]) -> bool:
        """Return whether the override applies to that role's module in a model with these layers."""
        chosen = self.layers is None or role.layer in self.layers.of(layers)
        return chosen and fnmatchcase(role.name, self.name)

    def __str__(self) -> str:
        layers = f"layers {self.layers}" if self.layers else ""
        return " and ".join(part for part in (f"'{self.name}'" if self.name != "*" else "", layers) if part) or "'*'"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A quantizer for every slot of a model. Equal fields mean the same arithmetic; the name is a label and does not
    count."""

    linear: LinearQuantizers
    grouped_linear: LinearQuantizers | None = None
    """The section of grouped linears; None means the same as `linear`."""
    dpa: DpaQuantizers = HIGH_PRECISION["dpa"]
    head: LinearQuantizers = HIGH_PRECISION["head"]
    embedding: HybridQuantizer = HIGH_PRECISION["embedding"]
    norm: HybridQuantizer = HIGH_PRECISION["norm"]
    overrides: tuple[Override, ...] = ()
    """Applied in order to linears (the head included), grouped linears and attention; the last match wins."""
    gemm: str = "exact"
    """exact: any two formats may meet, emulated on exact operands. strict: the same, but only pairs that hardware
    takes. native: such pairs on the machine's tensor cores, or an error."""
    comm: Comm | None = None
    """The format in which partial gradients are exchanged, emulated; None: without rounding."""
    schedule: tuple[Change, ...] = ()
    """Later recipes of a training, in order. The fields above apply until the first of them."""

    def __post_init__(self) -> None:
        if self.grouped_linear is None:
            object.__setattr__(self, "grouped_linear", self.linear)

    @classmethod
    def from_config(cls, config: Mapping[str, object], where: str = "recipe") -> "Recipe":
        """Return the recipe of a `recipe` config's sections, without a schedule. UserError with the key path of every
        fault."""
        unknown = [key for key in config if key not in KEYS]
        if unknown:
            raise UserError(
                f"{where}: unknown key '{unknown[0]}'{nearest(unknown[0], KEYS)}; it takes {', '.join(KEYS)}"
            )
        if config.get("linear") is None:
            raise UserError(f"{where}: 'linear' is missing; it takes {{input, weight, grad_output}} or one quantizer")
        faults, fields = Faults(), {key: value for key, value in config.items() if value is not None}
        parsed: dict[str, Any] = {"linear": faults.take(LinearQuantizers.parse, fields["linear"], f"{where}.linear")}
        defaults = HIGH_PRECISION | {"grouped_linear": parsed["linear"]}
        for key, section in (*SECTIONS.items(), ("head", LinearQuantizers)):
            if key in fields and key != "linear":
                parsed[key] = faults.take(section.parse, fields[key], f"{where}.{key}", defaults[key])
        for key in ("embedding", "norm"):
            if key in fields:
                parsed[key] = faults.take(parse_unprojected, fields[key], f"{where}.{key}")
        overrides = enumerate(fields.get("overrides") or ())
        parsed["overrides"] = tuple([faults.take(Override.parse, o, f"{where}.overrides[{i}]") for i, o in overrides])
        parsed["gemm"] = faults.take(parse_gemm, fields.get("gemm", "exact"), where)
        if "comm" in fields:
            parsed["comm"] = faults.take(Comm.parse, fields["comm"], f"{where}.comm")
        faults.raise_any()
        return cls(**parsed)

    def to_config(self) -> dict[str, Any]:
        """Return the sections in canonical text, without the schedule. Equal recipes have equal text; from_config()
        reads it."""
        sections = {key: getattr(self, key).texts() for key in (*SECTIONS, "head")}
        return sections | {
            "embedding": str(self.embedding),
            "norm": str(self.norm),
            "overrides": [override.to_config() for override in self.overrides],
            "gemm": self.gemm,
            **({} if self.comm is None else {"comm": self.comm.to_config()}),
        }

    def for_layers(self, layers: Sequence[int]) -> "Recipe":
        """Return the recipe for a model with these layers: overrides that count layers get indices instead."""
        overrides = [
            replace(o, layers=Layers(indices=tuple(sorted(o.layers.of(layers))))) if o.layers else o
            for o in self.overrides
        ]
        return replace(self, overrides=tuple(overrides))

    def resolve(self, roles: Iterable[QuantizerRole | None]) -> dict[QuantizerRole, HybridQuantizer]:
        """Return role -> quantizer for the roles of a model; None roles (boundary slots without a reader) are left out.

        Layers are counted over these roles. ValueError for a role that no module has.
        """
        roles = list(dict.fromkeys(role for role in roles if role is not None))
        layers = layers_of(roles)
        return {role: self._quantizer(role, layers) for role in roles}

    def entered(self) -> "Recipe":
        """Return the recipe itself, which is a value."""
        return self

    @property
    def answers_of(self) -> object:
        """The recipe itself."""
        return self

    def check_boundary(self, role: QuantizerRole | None) -> None:
        """Accept: sections do not cover boundaries."""

    def quantizer(self, role: QuantizerRole) -> HybridQuantizer:
        """Return the quantizer of one slot.

        Raises:
            ValueError: the role belongs to no module.
            UserError: an override counts layers, so the whole model must be known.
        """
        relative = [override for override in self.overrides if override.layers and override.layers.relative]
        if relative:
            raise UserError(
                f"recipe.overrides: {relative[0]} counts the layers of a model, and one module alone has none;"
                " give the recipe to the whole model by set_recipe, or name the layers by index"
            )
        return self.resolve([role])[role]

    def _quantizer(self, role: QuantizerRole, layers: Sequence[int]) -> HybridQuantizer:
        if role.tensor_type not in TENSOR_TYPES.get(role.module_type, ()):
            raise ValueError(f"no slot {role}; module types and their tensors: {TENSOR_TYPES}")
        if role.module_type not in SECTIONS:
            return self.embedding if role.module_type == "embedding" else self.norm
        is_head = role.module_type == "linear" and role.name == HEAD
        section: Section = self.head if is_head else getattr(self, role.module_type)
        for override in self.overrides:
            other = getattr(override, role.module_type)
            if other is not None and override.matches(role, layers):
                section = other
        return getattr(section, role.tensor_type)


def parse_gemm(value: object, where: str = "recipe") -> str:
    """Return the GEMM mode of a value. where: starts the error. UserError for an unknown mode."""
    mode = str(value)
    if mode not in GEMM_MODES:
        raise UserError(f"{where}.gemm is '{mode}'{nearest(mode, GEMM_MODES)}; allowed: {', '.join(GEMM_MODES)}")
    return mode


def unread_overrides(recipe: AnyRecipe, roles: Sequence[QuantizerRole]) -> Iterator[str]:
    """Yield a fault for each override that applies to no module: its quantizers would silently not be used."""
    layers = layers_of(roles)
    roles = [role for role in roles if role.module_type in MODULE_GEMMS]
    names = list(dict.fromkeys(role.name for role in roles)) or ["no module with products"]
    for index, override in enumerate(recipe.overrides if isinstance(recipe, Recipe) else ()):
        where = f"overrides[{index}] ({override})"
        if not any(getattr(override, role.module_type) and override.matches(role, layers) for role in roles):
            named = any(fnmatchcase(name, override.name) for name in names)
            hint = f"; the model has layers {layers[0]} to {layers[-1]}" if named and layers else ""
            known = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            hint = hint or f"{nearest(override.name, names)}; the model has {known}"
            yield f"{where} matches no module{hint}"
