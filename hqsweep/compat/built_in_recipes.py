"""The five built-in recipes by TransformerEngine's names. Each is a factory from its options, which are its attributes.

No environment variable changes them. An option that would change a number and does not exist here is refused.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from hqsweep.compat.arguments import flag, one_of
from hqsweep.compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from hqsweep.compat.recipes import DelayedScalingRequest, Format, Recipe, check_attention, overridden
from hqsweep.errors import UserError
from hqsweep.recipe.base import Change
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.roles import GRADIENTS, QuantizerRole


@dataclass(frozen=True)
class MMParams:
    """Options of a product. Sums are float32 here, as with the split accumulator."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a recipe quantizes the tensors of one kind, to read."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True)
class _Options:
    """The options of a built-in recipe, and its factory."""

    kind: ClassVar[str] = ""

    def __call__(self, role: QuantizerRole | None) -> Any:
        role = role or QuantizerRole()
        if role.tensor_type == "grad_input":
            role = replace(role, tensor_type="grad_output")
        made = self.quantizer(role)
        return made if self.backward_override is None else overridden(made, role, self.backward_override)

    def quantizer(self, role: QuantizerRole) -> Any:
        """The quantizer or request of a slot."""
        raise NotImplementedError

    def check(self, formats: tuple[Format, ...] = (Format.E4M3, Format.HYBRID)) -> None:
        """UserError for options that do not exist here."""
        check_attention(self.kind, self.fp8_dpa, self.fp8_mha, self.backward_override)
        one_of(self.kind, "fp8_format", self.fp8_format, formats)

    def check_entered(self) -> None:
        """UserError for options that have no modules, but quantizers."""

    def refuse_attention(self) -> None:
        """UserError for attention in FP8, which differs by tensor."""
        if self.fp8_dpa:
            raise UserError(
                f"{self.kind}: fp8_dpa=True has no counterpart here; give CustomRecipe(qfactory, fp8_dpa=True) a"
                " factory that answers roles of dpa, such as nvfp4_linear_fp8_dpa_factory"
            )


@dataclass(frozen=True)
class DelayedScalingOptions(_Options):
    kind = "DelayedScaling"
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()
        one_of(self.kind, "backward_override", self.backward_override, (None,))
        self.quantizer(QuantizerRole()).text(QuantizerRole(), self.kind)

    def quantizer(self, role: QuantizerRole) -> DelayedScalingRequest:
        return DelayedScalingRequest(**{f.name: getattr(self, f.name) for f in fields(DelayedScalingRequest)})


@dataclass(frozen=True)
class Float8CurrentScalingOptions(_Options):
    kind = "Float8CurrentScaling"
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()
        self.refuse_attention()
        check_products(self, ("fp8_gemm_dgrad", "fp8_gemm_wgrad"))
        flag(self.kind, "use_power_2_scales", self.use_power_2_scales)

    def quantizer(self, role: QuantizerRole) -> Float8CurrentScalingQuantizer:
        dtype = self.fp8_format.dtype(role)
        return Float8CurrentScalingQuantizer(dtype, force_pow_2_scales=bool(self.use_power_2_scales))


@dataclass(frozen=True)
class MXFP8BlockScalingOptions(_Options):
    kind = "MXFP8BlockScaling"
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self.check()
        self.refuse_attention()
        flag(self.kind, "enable_2d_quantization", self.enable_2d_quantization)

    def quantizer(self, role: QuantizerRole) -> MXFP8Quantizer:
        two_d = bool(self.enable_2d_quantization) and role.tensor_type == "weight"
        return MXFP8Quantizer(self.fp8_format.dtype(role), with_2d_quantization=two_d)


@dataclass(frozen=True)
class Float8BlockScalingOptions(_Options):
    kind = "Float8BlockScaling"
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()
        self.refuse_attention()
        check_products(self, ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"))
        flag(self.kind, "use_f32_scales", self.use_f32_scales)
        names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in names:
            one_of(self.kind, name, getattr(self, name), (1, 2))
        tiled = [name for name in names if getattr(self, name) == 2]
        if len(tiled) > 1:
            raise UserError(
                f"{self.kind}: {' and '.join(tiled)} are 2; a product takes tiles on one side, so give 1 to one"
            )

    def quantizer(self, role: QuantizerRole) -> Float8BlockQuantizer:
        dim = self.w_block_scaling_dim if role.tensor_type == "weight" else self.x_block_scaling_dim
        dim = self.grad_block_scaling_dim if role.tensor_type in GRADIENTS else dim
        options = {"force_pow_2_scales": not self.use_f32_scales, "block_scaling_dim": dim}
        return Float8BlockQuantizer(self.fp8_format.dtype(role), **options)


@dataclass(frozen=True)
class NVFP4BlockScalingOptions(_Options):
    kind = "NVFP4BlockScaling"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check((Format.E4M3,))
        self.refuse_attention()
        one_of(self.kind, "fp4_format", self.fp4_format, (Format.E2M1,))
        for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"):
            flag(self.kind, name, getattr(self, name))
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            one_of(self.kind, name, getattr(self, name), ("none", "weights", "activations", "all"))
        one_of(self.kind, "nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ("MAE", "MSE"))
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise UserError(
                f"{self.kind}: nvfp4_4over6={self.nvfp4_4over6!r} is for activations without the Hadamard transform;"
                " give disable_rht=True"
            )

    def check_entered(self) -> None:
        if self.row_scaled_activation and (self.backward_override is None or not self.disable_rht):
            raise UserError(
                f"{self.kind}: row_scaled_activation=True is for rowwise operands without the Hadamard transform; give"
                " disable_rht=True, and a backward_override, whose backward reads no others"
            )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """Of inputs and outputs."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """Of weights."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """Of gradients."""
        drawn = not self.disable_stochastic_rounding
        return QParams(random_hadamard_transform=not self.disable_rht, stochastic_rounding=drawn)

    def quantizer(self, role: QuantizerRole) -> NVFP4Quantizer:
        if role.tensor_type in GRADIENTS:
            return self._made(rht=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding)
        weight = role.tensor_type == "weight"
        scopes = ("weights" if weight else "activations", "all")
        chosen = self.nvfp4_4over6 in scopes
        return self._made(
            rht=not (weight or self.disable_rht),
            with_2d_quantization=weight and not self.disable_2d_quantization,
            row_scaled_nvfp4=bool(self.row_scaled_activation) and not weight,
            nvfp4_use_4over6=chosen,
            nvfp4_e4m3_max=256 if chosen and self.nvfp4_4over6_e4m3_use_256 in scopes else 448,
        )

    def _made(self, rht: bool, **options: Any) -> NVFP4Quantizer:
        mode = self.nvfp4_4over6_err_mode
        return NVFP4Quantizer(with_rht=rht, with_post_rht_amax=rht, nvfp4_4over6_err_mode=mode, **options)


def check_products(options: Any, names: tuple[str, ...]) -> None:
    """UserError for a product whose sums would lose bits."""
    for name in names:
        if not getattr(options, name).use_split_accumulator:
            raise UserError(
                f"{options.kind}: {name}=MMParams(use_split_accumulator=False) has no counterpart here: sums are"
                " float32; leave it out"
            )


class BuiltIn(Recipe):
    """A recipe whose options are its attributes. Arguments, their order and defaults are as in TransformerEngine, and
    no environment variable changes them. UserError for options that would change a number and do not exist here."""

    options: ClassVar[type[_Options]]
    names: ClassVar[Collection[str]]
    """Attributes that are read from the options."""

    def __init_subclass__(cls) -> None:
        own = inspect.signature(cls.options).replace(return_annotation=inspect.Signature.empty)
        cls.__signature__ = own
        properties = {name for name, value in vars(cls.options).items() if isinstance(value, property)}
        cls.names = properties | {field.name for field in fields(cls.options)}

    def __init__(
        self, *positional: Any, qfactory: Any = None, gemm: str = "exact", schedule: Sequence[Change] = (), **named: Any
    ) -> None:
        """qfactory: the options themselves, which dataclasses.replace() gives."""
        given = qfactory or self.options(*positional, **named)
        super().__init__(qfactory=given, fp8_dpa=bool(given.fp8_dpa), gemm=gemm, schedule=tuple(schedule))

    def entered(self) -> CustomRecipe:
        self.qfactory.check_entered()
        return super().entered()

    def __getattr__(self, name: str) -> Any:
        if name in self.names and "qfactory" in vars(self):
            return getattr(self.qfactory, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        given = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self.options))
        return f"{type(self).__name__}({given})"


class DelayedScaling(BuiltIn):
    """FP8 with scales from the amaxes of earlier steps."""

    options, family = DelayedScalingOptions, "delayed"


class Float8CurrentScaling(BuiltIn):
    """FP8 with one scale for a tensor, from its own amax."""

    options, family = Float8CurrentScalingOptions, "current"


class MXFP8BlockScaling(BuiltIn):
    """MXFP8; enable_2d_quantization: tiles of 32x32 for weights. margin has no effect, as in TransformerEngine."""

    options, family, alignment = MXFP8BlockScalingOptions, "mxfp8", 32


class Float8BlockScaling(BuiltIn):
    """FP8 with a scale for 1x128 blocks, and for 128x128 tiles of weights."""

    options, family = Float8BlockScalingOptions, "block"


class NVFP4BlockScaling(BuiltIn):
    """NVFP4: tiles for weights; the Hadamard transform of inputs and gradients; stochastic rounding of gradients."""

    options, family, alignment = NVFP4BlockScalingOptions, "nvfp4", 128
