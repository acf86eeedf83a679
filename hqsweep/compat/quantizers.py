"""Quantizers, recipes and contexts by TransformerEngine's names and arguments.

Calls of quantizers return the frozen values of this package. CustomRecipe, autocast and quantized_model_init take
TransformerEngine's arguments in its order.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hqsweep import nn
from hqsweep.compat.activation_dtype import BF16, FORMATS, ToBF16
from hqsweep.compat.arguments import flag, refuse, shown, taken
from hqsweep.errors import UserError
from hqsweep.formats import MX, NVFP4, Fp8Block, Fp8Current, parse
from hqsweep.formats import Format as _Format
from hqsweep.quant.hybrid import HybridQuantizer as _Quantizer
from hqsweep.recipe import custom
from hqsweep.recipe.base import AnyRecipe, Change
from hqsweep.recipe.roles import GRADIENTS, QuantizerRole
from hqsweep.recipe.sections import Section


class DType(Enum):
    """Element types of codes."""

    kFloat8E4M3 = "e4m3"
    kFloat8E5M2 = "e5m2"
    kFloat4E2M1 = "e2m1"


class Format(Enum):
    """The formats, as (element of forward tensors, gradients' element)."""

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")
    E2M1 = ("e2m1", "e2m1")


def te_device_type() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def quantizer_factory(key: tuple[str, int]) -> Callable[[Callable], Callable]:
    """A decorator that names a factory and its version; here it returns the factory itself, with the key as .key."""

    def named(factory: Callable) -> Callable:
        factory.key = key
        return factory

    return named


@dataclass(frozen=True, kw_only=True)
class RowwiseQuantizer:
    """A format for rowwise operands only; it must be composed in a HybridQuantizer."""

    rowwise: _Format

    @property
    def columnwise(self) -> _Format:
        raise UserError(f"{self.rowwise} is for rowwise operands only; make it rowwise_quantizer of a HybridQuantizer")

    def quantizer(self, role: QuantizerRole) -> _Quantizer:
        """UserError, always: a slot has two directions."""
        return _Quantizer(self.rowwise, self.columnwise)


def HybridQuantizer(
    *,
    rowwise_quantizer: _Quantizer | RowwiseQuantizer,
    columnwise_quantizer: _Quantizer,
    columnwise_source: str = "original",
) -> _Quantizer:
    """Return a quantizer with the rowwise format of the first and the columnwise format of the second."""
    for name, quantizer in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
        if not isinstance(quantizer, _Quantizer | RowwiseQuantizer):
            raise UserError(f"HybridQuantizer: {name}_quantizer is {quantizer!r}; it takes a quantizer (not a request)")
    return _Quantizer(rowwise_quantizer.rowwise, columnwise_quantizer.columnwise, columnwise_source)


def IdentityQuantizer(*, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> _Quantizer:
    """High precision in `dtype`, to which values are rounded. None is "bf16": the dtype of activations in modules of
    hqsweep.compat, and bfloat16 in linears of hqsweep.nn."""
    if dtype is None:
        return _both(BF16)
    if not isinstance(dtype, torch.dtype) or dtype not in FORMATS:
        raise UserError(f"IdentityQuantizer: dtype is {shown(dtype)}; it takes bfloat16, float16 or float32")
    return _both(ToBF16() if dtype is torch.bfloat16 else FORMATS[dtype])


def Float8CurrentScalingQuantizer(
    fp8_dtype: DType,
    device: Any = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    use_existing_amax: bool = False,
    with_amax_reduction: bool = False,
    amax_reduction_group: Any = None,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
    scale: Any = None,
    amax: Any = None,
) -> _Quantizer:
    """Return fp8_current: one scale for the tensor, from its own amax. scale and amax are buffers there, without effect
    here."""
    kind = "Float8CurrentScalingQuantizer"
    refuse(kind, {"use_existing_amax": use_existing_amax, "with_amax_reduction": with_amax_reduction})
    element, pow2 = _element(kind, fp8_dtype), flag(kind, "force_pow_2_scales", force_pow_2_scales)
    taken(kind, "amax_epsilon", amax_epsilon, 0.0)
    return _both(Fp8Current(element_name=element, pow2=pow2, amax_epsilon=amax_epsilon))


def Float8BlockQuantizer(
    fp8_dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = True,
    block_scaling_dim: int = 2,
) -> _Quantizer:
    """fp8_block: 1x128 blocks with block_scaling_dim=1, 128x128 tiles with 2."""
    _one_of("Float8BlockQuantizer", "block_scaling_dim", block_scaling_dim, (1, 2))
    taken("Float8BlockQuantizer", "amax_epsilon", amax_epsilon, 0.0)
    options = {"pow2": flag("Float8BlockQuantizer", "force_pow_2_scales", force_pow_2_scales)}
    element, two_d = _element("Float8BlockQuantizer", fp8_dtype), block_scaling_dim == 2
    return _both(Fp8Block(element_name=element, amax_epsilon=amax_epsilon, two_d=two_d, **options))


def MXFP8Quantizer(
    fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
) -> _Quantizer:
    """mxfp8: an E8M0 scale for 32 elements, or for tiles of 32x32."""
    element = _element("MXFP8Quantizer", fp8_dtype)
    two_d = flag("MXFP8Quantizer", "with_2d_quantization", with_2d_quantization)
    return _both(MX(name="mxfp8", element_name=element, two_d=two_d))


def NVFP4Quantizer(
    fp4_dtype: DType = DType.kFloat4E2M1,
    rowwise: bool = True,
    columnwise: bool = True,
    with_amax_reduction: bool = False,
    amax_reduction_group: Any = None,
    with_rht: bool = False,
    with_post_rht_amax: bool = False,
    with_2d_quantization: bool = False,
    stochastic_rounding: bool = False,
    row_scaled_nvfp4: bool = False,
    nvfp4_use_4over6: bool = False,
    nvfp4_e4m3_max: int = 448,
    nvfp4_4over6_err_mode: str = "MAE",
    with_random_sign_mask: bool = True,
) -> _Quantizer | RowwiseQuantizer:
    """nvfp4. The transform acts on the columnwise operand, and the amax is always the transformed values'.
    nvfp4_e4m3_max (448 or 256) and nvfp4_4over6_err_mode ("MAE" or "MSE") set how nvfp4_use_4over6 decides; without it
    they have no effect."""
    kind, given = "NVFP4Quantizer", {
        "with_rht": with_rht, "with_post_rht_amax": with_post_rht_amax, "with_2d_quantization": with_2d_quantization,
        "stochastic_rounding": stochastic_rounding, "row_scaled_nvfp4": row_scaled_nvfp4,
        "nvfp4_use_4over6": nvfp4_use_4over6, "with_random_sign_mask": with_random_sign_mask,
    }  # fmt: skip
    refuse(kind, {"with_amax_reduction": with_amax_reduction})
    _one_of(kind, "fp4_dtype", fp4_dtype, (DType.kFloat4E2M1,))
    chosen = {name: flag(kind, name, value) for name, value in given.items()}
    if chosen["with_post_rht_amax"] != chosen["with_rht"]:
        raise UserError(
            f"{kind}: with_rht={with_rht} and with_post_rht_amax={with_post_rht_amax} differ; the amax here is always"
            " that of the values that are quantized, so give both the same value"
        )
    mode = nvfp4_4over6_err_mode.upper() if isinstance(nvfp4_4over6_err_mode, str) else nvfp4_4over6_err_mode
    _one_of(kind, "nvfp4_4over6_err_mode", mode, ("MAE", "MSE"))
    decides = {}
    if chosen["nvfp4_use_4over6"]:
        _one_of(kind, "nvfp4_e4m3_max", nvfp4_e4m3_max, (448, 256))
        e4m3_max = 448 if nvfp4_e4m3_max == 448 else 0  # 256 is the format's default
        decides = {"four_over_six": True, "error_mode": mode.lower(), "e4m3_max": e4m3_max}
    format = NVFP4(
        two_d=chosen["with_2d_quantization"],
        rht=chosen["with_rht"],
        rht_signed=chosen["with_random_sign_mask"] or not chosen["with_rht"],
        sr=chosen["stochastic_rounding"],
        row_scaled=chosen["row_scaled_nvfp4"],
        **decides,
    )
    return RowwiseQuantizer(rowwise=format) if format.row_scaled else _both(format)


@dataclass(frozen=True)
class DelayedScalingRequest:
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

    def quantizer(self, role: QuantizerRole) -> _Quantizer:
        """The quantizer of a slot; under Format.HYBRID gradients are E5M2."""
        return _both(parse(self.text(role)))

    def text(self, role: QuantizerRole) -> str:
        """The format string of a slot."""
        other = {"margin": self.margin, "scaling_factor_compute_algo": self.scaling_factor_compute_algo}
        refuse("DelayedScalingRequest", other)
        if not isinstance(self.amax_compute_algo, str) or self.amax_compute_algo not in ("max", "most_recent"):
            algorithm = f"amax_compute_algo is {shown(self.amax_compute_algo)}"
            raise UserError(f"DelayedScalingRequest: {algorithm}; it takes 'max' or 'most_recent'")
        _one_of("DelayedScalingRequest", "fp8_format", self.fp8_format, (Format.HYBRID, Format.E4M3, Format.E5M2))
        taken("DelayedScalingRequest", "amax_history_len", self.amax_history_len, 1024)
        local = not flag("DelayedScalingRequest", "reduce_amax", self.reduce_amax)
        element = self.fp8_format.value[role.tensor_type in GRADIENTS]
        options = [
            "+e5m2" if element == "e5m2" else "",
            "+most_recent" if self.amax_compute_algo == "most_recent" else "",
            "+local_amax" if local else "",
            f"+history{self.amax_history_len}" if self.amax_history_len != 1024 else "",
        ]
        return "fp8_delayed" + "".join(options)


def high_precision_factory(role: QuantizerRole | None) -> _Quantizer:
    """No quantization."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """FP8 with delayed scaling, gradients in E5M2."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> _Quantizer:
    """FP8 with current scaling, gradients in E5M2."""
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if _is(role, "grad_output") else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> _Quantizer:
    """FP8 with power-of-two scales for blocks, and for tiles of weights."""
    return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2 if _is(role, "weight") else 1)


def mxfp8_factory(role: QuantizerRole | None) -> _Quantizer:
    """MXFP8 everywhere."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> _Quantizer:
    """NVFP4: tiles for weights; elsewhere the Hadamard transform, with stochastic rounding of gradients."""
    if _is(role, "weight"):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=_is(role, "grad_output"))


def _is(role: QuantizerRole | None, tensor_type: str) -> bool:
    return role is not None and role.tensor_type == tensor_type


def _both(format: _Format) -> _Quantizer:
    return _Quantizer(format.rowwise_form, format)


def _element(where: str, dtype: DType) -> str:
    _one_of(where, "fp8_dtype", dtype, (DType.kFloat8E4M3, DType.kFloat8E5M2))
    return dtype.value


def _one_of(where: str, argument: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise UserError for a value outside `allowed`. It is compared only with values of its type."""
    if not any(type(value) is type(known) and value == known for known in allowed):
        listed = " or ".join(str(known) for known in allowed)
        raise UserError(f"{where}: {argument} is {shown(value)}; it takes {listed}")


Recipe = AnyRecipe | Section | _Quantizer | str | Mapping[str, Any] | None


class CustomRecipe(custom.CustomRecipe):
    """hqsweep.recipe.CustomRecipe, whose arguments come in TransformerEngine's order.

    fp8_format and quantization_alignment change no number: the factory says formats, and each format its alignment.
    UserError for fp8_mha and backward_override, which the factory says here.
    """

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
        if flag("CustomRecipe", "fp8_mha", fp8_mha):
            raise UserError(
                "CustomRecipe: fp8_mha=True has no counterpart here; leave it out: hqsweep.nn's MultiheadAttention has"
                " AttentionOptions(quantize_boundaries=True)"
            )
        if backward_override is not None:
            raise UserError(
                f"CustomRecipe: backward_override={shown(backward_override)} has no counterpart here; have the factory"
                " return a HybridQuantizer with columnwise_quantizer=IdentityQuantizer(), and for gradients"
                " IdentityQuantizer()"
            )
        dpa = flag("CustomRecipe", "fp8_dpa", fp8_dpa)
        super().__init__(qfactory=qfactory, fp8_dpa=dpa, gemm=gemm, schedule=schedule)

    def __reduce__(self) -> tuple[Any, ...]:
        _, (qfactory, fp8_dpa, gemm, schedule) = super().__reduce__()
        return _rebuild, (qfactory, fp8_dpa, gemm, schedule)


def _rebuild(qfactory: Callable, fp8_dpa: bool, gemm: str, schedule: tuple[Change, ...]) -> CustomRecipe:
    return CustomRecipe(qfactory, fp8_dpa=fp8_dpa, gemm=gemm, schedule=schedule)


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """hqsweep.nn.autocast, whose arguments come in TransformerEngine's order. _graph has no effect. UserError for
    calibrating, and for a group, which hqsweep.nn.quantization takes."""
    if flag("autocast", "calibrating", calibrating):
        raise UserError(
            "autocast: calibrating=True has no counterpart here; leave it out: fp8_delayed takes the amax of the tensor"
            " itself where its history is empty"
        )
    if amax_reduction_group is not None:
        raise UserError(
            f"autocast: amax_reduction_group={shown(amax_reduction_group)} is given to"
            " hqsweep.nn.quantization(amax_group=...) here; by default amaxes are those of all ranks"
        )
    return nn.autocast(flag("autocast", "enabled", enabled), recipe=recipe)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """hqsweep.nn.quantized_model_init, whose arguments come in TransformerEngine's order."""
    kind, kept = "quantized_model_init", preserve_high_precision_init_val
    options = {"preserve_high_precision_init_val": flag(kind, "preserve_high_precision_init_val", kept)}
    with nn.quantized_model_init(enabled=flag(kind, "enabled", enabled), recipe=recipe, **options):
        yield
