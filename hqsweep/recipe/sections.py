"""Sections of a recipe: one quantizer per tensor of a kind of module; and Comm, the exchange of gradients.

A section's text is a mapping from tensors to quantizers, or one quantizer for all. All faults of a section are reported
at once, each with the slot's key path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from hqsweep.errors import UserError, nearest
from hqsweep.formats import Format, parse
from hqsweep.memo import cached_property
from hqsweep.quant.hybrid import HybridQuantizer, IdentityQuantizer, ProjectedQuantizer
from hqsweep.recipe.gemms import expanded
from hqsweep.recipe.roles import IN_HIGH_PRECISION, TENSOR_TYPES

WEIGHTS_ALONE = "a projection is for the weight of a linear; give another tensor its format alone"


class Faults:
    """Collects faults, so that all are reported at once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def take(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return make(*arguments), or None and record a fault."""
        try:
            return make(*arguments)
        except UserError as error:
            self.texts.append(str(error))
            return None

    def raise_any(self) -> None:
        """Raise UserError with all faults in one sentence, if there are any."""
        if self.texts:
            raise UserError("; ".join(dict.fromkeys(self.texts)))


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the sections. A subclass has one field per tensor of its module type, with the tensor's name."""

    PROJECTED: ClassVar[tuple[str, ...]] = ()
    """The slots that take a projection."""

    def __post_init__(self) -> None:
        _ = self.stochastic, self.identity  # computed now, as in HybridQuantizer
        for slot, quantizer in slots(self).items():
            if isinstance(quantizer, ProjectedQuantizer) and slot not in self.PROJECTED:
                raise UserError(f"{slot}: {quantizer}: {WEIGHTS_ALONE}")

    @classmethod
    def tensors(cls) -> tuple[str, ...]:
        """Return the names of a section's slots."""
        raise NotImplementedError

    @classmethod
    def parse(cls, value: object, where: str, default: "Self | None" = None) -> Self:
        """Return the section of {tensor: quantizer}, or of one quantizer for all. where: starts every error.

        Missing tensors take the quantizers of `default`; without a default they are faults.
        """
        tensors = cls.tensors()
        if isinstance(value, Mapping) and "rowwise" not in value:
            texts = value
        elif value is None:
            texts = {}
        else:
            return cls._checked(where, dict.fromkeys(tensors, parse_quantizer(value, where)))
        faults = Faults()
        takes = f"it takes {', '.join(tensors)}"
        faults.texts += [f"{where}: unknown key '{k}'{nearest(k, tensors)}; {takes}" for k in texts if k not in tensors]
        missing = [t for t in tensors if texts.get(t) is None]
        if default is None and not faults.texts:
            faults.texts += [f"{where}: '{tensor}' is missing; {takes}" for tensor in missing]
        parsed = {t: faults.take(parse_quantizer, texts[t], f"{where}.{t}") for t in tensors if t not in missing}
        faults.raise_any()
        return cls._checked(where, {t: parsed.get(t) or getattr(default, t) for t in tensors})

    @classmethod
    def _checked(cls, where: str, quantizers: Mapping[str, HybridQuantizer]) -> Self:
        try:
            return cls(**quantizers)
        except UserError as error:
            raise UserError(f"{where}.{error}") from None

    @cached_property
    def stochastic(self) -> bool:
        """Whether a slot draws random bits."""
        return any(quantizer is not None and quantizer.stochastic for quantizer in slots(self).values())

    @cached_property
    def identity(self) -> Format | None:
        """The high-precision format that all slots have in both directions.

        None if there is another format, or a quantizer of a user's class.
        """
        quantizers = [quantizer for quantizer in slots(self).values() if quantizer is not None]
        formats = {format for q in quantizers for format in (q.rowwise, q.columnwise)}
        first = next(iter(formats))
        plain = all(type(q) is HybridQuantizer for q in quantizers)
        return first if plain and len(formats) == 1 and first.high_precision else None

    def texts(self) -> dict[str, str]:
        """Return tensor -> its quantizer's text, as parse() takes it."""
        return {tensor: str(getattr(self, tensor)) for tensor in self.tensors()}


@dataclass(frozen=True, kw_only=True)
class LinearQuantizers(Section):
    """The slots of a linear or grouped linear module.

    A recipe gives the first three, or `gemms` in their place (hqsweep.recipe.gemms). output and grad_input are boundary
    slots. They are None unless the module knows who reads its output, or the returned gradient
    (`output_quantizer_role`, `grad_input_quantizer_role`).
    """

    PROJECTED = ("weight",)

    input: HybridQuantizer
    weight: HybridQuantizer
    grad_output: HybridQuantizer
    output: HybridQuantizer | None = None
    grad_input: HybridQuantizer | None = None

    @classmethod
    def parse(cls, value: object, where: str, default: Self | None = None) -> Self:
        return super().parse(expanded(value, where), where, default)

    @classmethod
    def tensors(cls) -> tuple[str, ...]:
        return TENSOR_TYPES["linear"]


@dataclass(frozen=True, kw_only=True)
class DpaQuantizers(Section):
    """The slots of dot-product attention: queries, keys and values; softmax output; gradients of output and softmax.

    output and grad_input are boundary slots, as in LinearQuantizers.
    """

    qkv: HybridQuantizer
    s: HybridQuantizer
    do: HybridQuantizer
    dp: HybridQuantizer
    output: HybridQuantizer | None = None
    grad_input: HybridQuantizer | None = None

    @classmethod
    def tensors(cls) -> tuple[str, ...]:
        return TENSOR_TYPES["dpa"]


@dataclass(frozen=True, kw_only=True)
class WeightQuantizers(Section):
    """The slot of a module whose weight is not a GEMM operand: an embedding table, the gain of a norm."""

    weight: HybridQuantizer

    @classmethod
    def tensors(cls) -> tuple[str, ...]:
        return TENSOR_TYPES["norm"]


MODULE_SECTIONS: dict[str, type[Section]] = {
    "linear": LinearQuantizers, "grouped_linear": LinearQuantizers, "dpa": DpaQuantizers,
    "embedding": WeightQuantizers, "norm": WeightQuantizers,
}  # fmt: skip
"""Module type -> its section."""


def slots(quantizers: Section) -> dict[str, HybridQuantizer | None]:
    """Return slot -> quantizer, boundary slots included."""
    return {field.name: getattr(quantizers, field.name) for field in fields(quantizers)}


def parse_quantizer(value: object, where: str) -> HybridQuantizer:
    """Return HybridQuantizer.parse(value). where: starts the error."""
    try:
        return HybridQuantizer.parse(value)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def parse_unprojected(value: object, where: str) -> HybridQuantizer:
    """Return parse_quantizer(), for a tensor that is no weight of a linear."""
    quantizer = parse_quantizer(value, where)
    if isinstance(quantizer, ProjectedQuantizer):
        raise UserError(f"{where}: {quantizer}: {WEIGHTS_ALONE}")
    return quantizer


HIGH_PRECISION = {
    "head": LinearQuantizers.parse(IN_HIGH_PRECISION["head"], "recipe.head"),
    "dpa": DpaQuantizers.parse(IN_HIGH_PRECISION["dpa"], "recipe.dpa"),
    "embedding": IdentityQuantizer(IN_HIGH_PRECISION["embedding"]),
    "norm": IdentityQuantizer(IN_HIGH_PRECISION["norm"]),
}
"""The quantizers of parts that a recipe does not mention."""


COMM_WIDTH = 128
"""The row length of a gradient in memory order, which is rounded row by row."""
COMM_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Comm:
    """The format in which each data-parallel rank's gradient is exchanged, emulated in one process.

    A step's batch is split into `ranks` parts. The gradient of each part is rounded before the gradients are added in
    FP32, in the order of the parts.
    """

    format: Format
    ranks: int = COMM_RANKS

    @classmethod
    def parse(cls, value: object, where: str) -> "Comm":
        """Return the exchange of {format, ranks}, or of a format for COMM_RANKS ranks. where: starts every error."""
        fields = value if isinstance(value, Mapping) else {"format": value}
        unknown = [key for key in fields if key not in ("format", "ranks")]
        if unknown or not isinstance(fields.get("format"), str):
            hint = nearest(unknown[0], ("format", "ranks")) if unknown else ""
            raise UserError(f"{where} is {value!r}; it takes a format, such as bf16, or {{format, ranks}}{hint}")
        ranks = fields.get("ranks", COMM_RANKS)
        if type(ranks) is not int or ranks < 1:
            raise UserError(f"{where}.ranks: got {ranks!r}; it must be an integer of 1 or more")
        try:
            format = parse(fields["format"])
        except UserError as error:
            raise UserError(f"{where}.format: {error}") from None
        if format.rht or format.two_d or format.delayed:
            raise UserError(
                f"{where}.format: {format} has a transform, tiles of several rows, or scales of earlier steps; give a"
                " format whose scales are of the gradient itself, such as bf16, fp8_current, mxfp8 or nvfp4+sr"
            )
        return cls(format=format, ranks=ranks)

    def to_config(self) -> dict[str, str | int]:
        """Return the mapping that parse() takes."""
        return {"format": str(self.format), "ranks": self.ranks}

    def __str__(self) -> str:
        return f"{self.format} between {self.ranks} ranks"
