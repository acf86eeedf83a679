"""Recipe: a quantizer for every slot of a model, as a frozen value that is checked before anything runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hqsweep.errors import UserError, nearest
from hqsweep.quant.hybrid import HybridQuantizer, IdentityQuantizer
from hqsweep.quant.pairs import GEMMS, hardware_fault, mathematical_fault
from hqsweep.quant.roles import TENSOR_TYPES, QuantizerRole

GEMM_MODES = ("exact", "strict")
HEAD = "head"
"""Name of the output projection; it takes the recipe's `head` section instead of `linear`."""
KEYS = ("name", "linear", "head", "embedding", "norm", "overrides", "gemm")


@dataclass(frozen=True, kw_only=True)
class LinearQuantizers:
    """The three slots of a linear module."""

    input: HybridQuantizer
    weight: HybridQuantizer
    grad_output: HybridQuantizer

    @classmethod
    def parse(cls, value: "object", where: str) -> "LinearQuantizers":
        """From {input, weight, grad_output}, or one quantizer for all three. `where` starts every error."""
        tensors = TENSOR_TYPES["linear"]
        if not isinstance(value, Mapping) or "rowwise" in value:
            value = dict.fromkeys(tensors, value)
        unknown = [key for key in value if key not in tensors]
        if unknown:
            raise UserError(
                f"{where}: unknown key '{unknown[0]}'{nearest(unknown[0], tensors)}; it takes {', '.join(tensors)}"
            )
        missing = [key for key in tensors if value.get(key) is None]
        if missing:
            raise UserError(f"{where}: '{missing[0]}' is missing; it takes {', '.join(tensors)}")
        return cls(**{t: _quantizer(value[t], f"{where}.{t}") for t in tensors})


@dataclass(frozen=True, kw_only=True)
class Override:
    """Quantizers for the linears whose name matches a glob."""

    name: str
    linear: LinearQuantizers


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Equal fields mean the same arithmetic (the name is a label and does not count)."""

    linear: LinearQuantizers
    head: LinearQuantizers = field(default_factory=lambda: LinearQuantizers.parse("bf16", "recipe.head"))
    embedding: HybridQuantizer = field(default_factory=lambda: IdentityQuantizer("fp32"))
    norm: HybridQuantizer = field(default_factory=lambda: IdentityQuantizer("fp32"))
    overrides: tuple[Override, ...] = ()
    """Applied in order to linears, the head included; the last match wins."""
    gemm: str = "exact"
    """exact: any two formats may meet, emulated on exact operands. strict: only pairs that hardware takes."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Recipe":
        """From the `recipe` section of a config; UserError with the key path of what is wrong."""
        unknown = [key for key in config if key not in KEYS]
        if unknown:
            raise UserError(
                f"recipe: unknown key '{unknown[0]}'{nearest(unknown[0], KEYS)}; it takes {', '.join(KEYS)}"
            )
        if config.get("linear") is None:
            raise UserError("recipe: 'linear' is missing; it takes {input, weight, grad_output} or one quantizer")
        gemm = str(config.get("gemm", "exact"))
        if gemm not in GEMM_MODES:
            raise UserError(f"recipe.gemm is '{gemm}'{nearest(gemm, GEMM_MODES)}; allowed: {', '.join(GEMM_MODES)}")
        return cls(
            linear=LinearQuantizers.parse(config["linear"], "recipe.linear"),
            head=LinearQuantizers.parse(config.get("head") or "bf16", "recipe.head"),
            embedding=_quantizer(config.get("embedding") or "fp32", "recipe.embedding"),
            norm=_quantizer(config.get("norm") or "fp32", "recipe.norm"),
            overrides=tuple(_override(o, i) for i, o in enumerate(config.get("overrides") or ())),
            gemm=gemm,
        )

    def linear_quantizers(self, name: str) -> LinearQuantizers:
        """The slots of the linear with that name."""
        chosen = self.head if name == HEAD else self.linear
        for override in self.overrides:
            if fnmatchcase(name, override.name):
                chosen = override.linear
        return chosen

    def quantizer(self, role: QuantizerRole) -> HybridQuantizer:
        """The quantizer of one slot; ValueError for a role that no module has."""
        if role.tensor_type not in TENSOR_TYPES.get(role.module_type, ()):
            raise ValueError(f"no slot {role}; module types and their tensors: {TENSOR_TYPES}")
        if role.module_type == "linear":
            return getattr(self.linear_quantizers(role.name), role.tensor_type)
        return self.embedding if role.module_type == "embedding" else self.norm

    def validate(self, linears: Iterable[tuple[str, int, int]], tokens: int) -> None:
        """Check every GEMM of a model before it is built; UserError holds all faults in one sentence.

        linears: (name, in_features, out_features) of each linear; tokens: rows of its input in a training step.
        """
        linears = list(linears)
        faults = [fault for linear in linears for fault in self._linear_faults(*linear, tokens)]
        names = [name for name, _, _ in linears]
        for override in self.overrides:
            if not any(fnmatchcase(name, override.name) for name in names):
                raise UserError(
                    f"recipe.overrides: '{override.name}' matches no linear{nearest(override.name, names)};"
                    f" the model has {names[0]} to {names[-1]}"
                )
        if faults:
            count = Counter(text for _, text in faults)
            where = {text: name for name, text in reversed(faults)}
            more = {text: f" (and in {n - 1} more)" if n > 1 else "" for text, n in count.items()}
            raise UserError("recipe: " + "; ".join(f"{where[text]} {text}{more[text]}" for text in count))

    def _linear_faults(self, name: str, in_features: int, out_features: int, tokens: int) -> Iterable[tuple[str, str]]:
        quantizers = self.linear_quantizers(name)
        contracted = {"fprop": in_features, "dgrad": out_features, "wgrad": tokens}
        for gemm, slots in GEMMS.items():
            size = contracted[gemm]
            formats = [getattr(getattr(quantizers, tensor), direction) for tensor, direction in slots]
            spelled = [f"{t} {d} {f}" for (t, d), f in zip(slots, formats, strict=True)]
            misfits = {s: f.column_multiple for s, f in zip(spelled, formats, strict=True) if size % f.column_multiple}
            if misfits:
                takers = " and ".join(f"{s} takes a multiple of {m}" for s, m in misfits.items())
                yield name, f"{gemm}: the contracted axis has {size} elements, but {takers}"
            fault = mathematical_fault(*formats) or (hardware_fault(*formats) if self.gemm == "strict" else None)
            if fault:
                a, b = spelled
                strict = " under gemm=strict" if not mathematical_fault(*formats) else ""
                yield name, f"{gemm}: {a} cannot meet {b}{strict}: {fault}"


def _quantizer(value: object, where: str) -> HybridQuantizer:
    try:
        return HybridQuantizer.parse(value)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _override(value: object, index: int) -> Override:
    where = f"recipe.overrides[{index}]"
    if not isinstance(value, Mapping) or set(value) != {"name", "linear"}:
        raise UserError(f"{where} is {value!r}; it takes name (a glob on module names) and linear")
    return Override(name=str(value["name"]), linear=LinearQuantizers.parse(value["linear"], f"{where}.linear"))
