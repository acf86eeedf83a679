"""CustomRecipe and requests by TransformerEngine's names, and what all recipes share. Recipes are frozen values.

backward_override makes columnwise operands and gradients high precision, from the original values ("high_precision") or
from the rowwise codes ("dequantized").
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from hqsweep.compat.arguments import flag, one_of, refuse, shown, taken
from hqsweep.compat.modules.activation_dtype import BF16
from hqsweep.compat.quantizers import DType
from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.quant.hybrid import HybridQuantizer as Frozen
from hqsweep.recipe import custom
from hqsweep.recipe.base import Change
from hqsweep.recipe.roles import GRADIENTS, QuantizerRole

OVERRIDES = {"high_precision": "original", "dequantized": "rowwise_dequantized"}
"""backward_override -> the source of columnwise operands."""


class Largest(NamedTuple):
    """The largest values of a format."""

    max_fwd: float
    """Of tensors of the forward pass."""
    max_bwd: float
    """Of gradients."""


class Format(Enum):
    """The element types of forward tensors and of gradients."""

    E2M1 = Largest(6, 6)
    E4M3 = Largest(448, 448)
    E5M2 = Largest(57344, 57344)
    HYBRID = Largest(448, 57344)

    def dtype(self, role: QuantizerRole | None) -> DType:
        """The element type of a slot's codes."""
        is_gradient = role is not None and role.tensor_type in GRADIENTS
        largest = self.value.max_bwd if is_gradient else self.value.max_fwd
        return {6: DType.kFloat4E2M1, 448: DType.kFloat8E4M3, 57344: DType.kFloat8E5M2}[largest]


def quantizer_factory(key: tuple[str, int]) -> Callable[[Callable], Callable]:
    """A decorator that names a factory and its version; here it returns the factory itself, with the key as .key."""

    def named(factory: Callable) -> Callable:
        factory.key = key
        return factory

    return named


class QuantizerRequest:
    """The base of what a factory may return in place of a quantizer: quantizer(role) gives the slot's."""

    def quantizer(self, role: QuantizerRole) -> Frozen:
        """UserError, unless a subclass replaces it."""
        raise UserError(f"{type(self).__name__}: a request has no quantizer here; give DelayedScalingRequest")


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """fp8_delayed, whose scale comes from the amaxes of earlier steps: a history for each slot and direction.

    reduce_amax: amaxes are the largest over the ranks of torch.distributed (quantization's amax_group); without it
    every rank has its own, and DistributedDataParallel needs broadcast_buffers=False.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True

    def quantizer(self, role: QuantizerRole) -> Frozen:
        """The quantizer of a slot; under Format.HYBRID gradients are E5M2."""
        format = parse(self.text(role))
        return Frozen(format, format)

    def text(self, role: QuantizerRole, kind: str = "DelayedScalingRequest") -> str:
        """The format string of a slot. kind: who asks, for messages."""
        refuse(kind, {"margin": self.margin, "scaling_factor_compute_algo": self.scaling_factor_compute_algo})
        if not isinstance(self.amax_compute_algo, str) or self.amax_compute_algo not in ("max", "most_recent"):
            algorithm = f"amax_compute_algo is {shown(self.amax_compute_algo)}"
            raise UserError(f"{kind}: {algorithm}; it takes 'max' or 'most_recent'")
        one_of(kind, "fp8_format", self.fp8_format, (Format.HYBRID, Format.E4M3, Format.E5M2))
        taken(kind, "amax_history_len", self.amax_history_len, 1024)
        local = not flag(kind, "reduce_amax", self.reduce_amax)
        options = [
            "+e5m2" if self.fp8_format.dtype(role) is DType.kFloat8E5M2 else "",
            "+most_recent" if self.amax_compute_algo == "most_recent" else "",
            "+local_amax" if local else "",
            f"+history{self.amax_history_len}" if self.amax_history_len != 1024 else "",
        ]
        return "fp8_delayed" + "".join(options)


class Recipe(custom.CustomRecipe):
    """The base of all recipes."""

    family: ClassVar[str] = ""
    alignment: ClassVar[int] = 16
    """Fp8Padding's multiple for the rows of a member."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Nothing for the value that it has. UserError for another: a recipe is a value, and a change would reach
        modules that have asked it, or not."""
        if hasattr(self, name) and getattr(self, name) == value:
            return
        raise UserError(f"{type(self).__name__}: {name} cannot be assigned; build another recipe with it")

    def __reduce__(self) -> tuple[Any, ...]:
        super().__reduce__()  # which refuses a factory that cannot be pickled
        return _rebuild, (type(self), vars(self))

    def entered(self) -> custom.CustomRecipe:
        entered = super().entered()
        object.__setattr__(entered, "quantization_alignment", self.quantization_alignment)
        return entered

    @property
    def quantization_alignment(self) -> int:
        """The multiple to which Fp8Padding pads."""
        return self.alignment

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether it is NVFP4BlockScaling."""
        return cls.family == "nvfp4"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether it is MXFP8BlockScaling."""
        return cls.family == "mxfp8"

    @classmethod
    def delayed(cls) -> bool:
        """Whether it is DelayedScaling."""
        return cls.family == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether it is Float8CurrentScaling."""
        return cls.family == "current"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale."""
        return cls.family in ("delayed", "current")

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether it is Float8BlockScaling."""
        return cls.family == "block"

    @classmethod
    def custom(cls) -> bool:
        """Whether it is a CustomRecipe."""
        return cls.family == "custom"


def _rebuild(cls: type, state: Mapping[str, Any]) -> custom.CustomRecipe:
    made = object.__new__(cls)
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made


class CustomRecipe(Recipe):
    """hqsweep.recipe.CustomRecipe, whose arguments come in TransformerEngine's order.

    fp8_format changes no number: the factory says formats. quantization_alignment is Fp8Padding's. backward_override is
    for linears and experts. UserError for fp8_mha.
    """

    family = "custom"

    def __init__(
        self,
        qfactory: Callable[..., Any],
        fp8_format: Format = Format.HYBRID,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        quantization_alignment: int = 128,
        *,
        gemm: str = "exact",
        schedule: tuple[Change, ...] = (),
    ) -> None:
        check_attention("CustomRecipe", fp8_dpa, fp8_mha, backward_override)
        taken("CustomRecipe", "quantization_alignment", quantization_alignment, 128)
        if isinstance(qfactory, Overridden):  # from dataclasses.replace()
            backward_override = qfactory.override
        elif backward_override is not None:
            qfactory = Overridden(qfactory, backward_override)
        super().__init__(qfactory=qfactory, fp8_dpa=bool(fp8_dpa), gemm=gemm, schedule=schedule)
        own = {"fp8_format": fp8_format, "backward_override": backward_override, "fp8_mha": False}
        for name, value in (own | {"_alignment": quantization_alignment}).items():
            object.__setattr__(self, name, value)

    @property
    def quantization_alignment(self) -> int:
        return self._alignment


def check_attention(kind: str, fp8_dpa: Any, fp8_mha: Any, backward_override: Any) -> None:
    """UserError for options of attention and of the backward pass that do not exist here, alone or together."""
    if flag(kind, "fp8_mha", fp8_mha):
        raise UserError(
            f"{kind}: fp8_mha=True has no counterpart here; leave it out: hqsweep.nn's MultiheadAttention has"
            " AttentionOptions(quantize_boundaries=True)"
        )
    one_of(kind, "backward_override", backward_override, (None, *OVERRIDES))
    if flag(kind, "fp8_dpa", fp8_dpa) and backward_override is not None:
        raise UserError(
            f"{kind}: backward_override={shown(backward_override)} does not reach attention, and fp8_dpa=True asks for"
            " attention in FP8; leave one out"
        )


def overridden(quantizer: Any, role: QuantizerRole, override: str) -> Frozen:
    """The quantizer of a slot under backward_override: only rowwise operands of inputs and weights stay quantized.
    UserError for delayed scaling, and for a quantizer with a quantize() of its own."""
    if role.tensor_type in GRADIENTS:
        return Frozen(BF16, BF16)
    if not getattr(quantizer, "is_plain", type(quantizer) is Frozen):
        raise UserError(
            f"backward_override={override!r} keeps only the format of {type(quantizer).__name__}, which quantizes by a"
            " method of its own; leave it out, or use a quantizer of hqsweep.compat"
        )
    rowwise = quantizer.rowwise
    if rowwise.delayed:
        raise UserError(f"backward_override={override!r} is not for {rowwise}; leave it out, or use another format")
    return Frozen(rowwise, BF16, OVERRIDES[override])


@dataclass(frozen=True)
class Overridden:
    """A factory under backward_override."""

    factory: Callable[..., Any]
    override: str

    def __call__(self, role: QuantizerRole | None) -> Any:
        answer = self.factory(role)
        if role is None or not role.module_type:
            return answer
        if isinstance(answer, QuantizerRequest):
            answer = answer.quantizer(role)
        if isinstance(answer, str):
            answer = Frozen.parse(answer)
        return overridden(answer, role, self.override) if hasattr(answer, "rowwise") else answer


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The multiple to which Fp8Padding pads the rows of each member under a recipe."""
    return recipe.quantization_alignment
