"""Quantizers and factories by TransformerEngine's names and arguments; calls return this package's frozen values."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from hqsweep.errors import UserError
from hqsweep.formats import MX, NVFP4, Fp8Block, Fp8Current, Identity, parse
from hqsweep.formats import Format as _Format
from hqsweep.quant.hybrid import HybridQuantizer as _Quantizer
from hqsweep.recipe.roles import GRADIENTS, QuantizerRole


class DType(Enum):
    """Element types of codes."""

    kFloat8E4M3 = "e4m3"
    kFloat8E5M2 = "e5m2"
    kFloat4E2M1 = "e2m1"


class Format(Enum):
    """The formats, as (element of forward tensors, element of gradients)."""

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
    """The rowwise format of the one and the columnwise format of the other."""
    for name, quantizer in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
        if not isinstance(quantizer, _Quantizer | RowwiseQuantizer):
            raise UserError(f"HybridQuantizer: {name}_quantizer is {quantizer!r}; it takes a quantizer (not a request)")
    return _Quantizer(rowwise_quantizer.rowwise, columnwise_quantizer.columnwise, columnwise_source)


def IdentityQuantizer(*, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> _Quantizer:
    """High precision in `dtype`; None is bfloat16, in which linears read and write."""
    names = {None: "bf16", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if dtype not in names:
        raise UserError(f"IdentityQuantizer: dtype is {dtype}; it takes bfloat16, float16 or float32")
    return _both(Identity(name=names[dtype]))


def Float8CurrentScalingQuantizer(
    fp8_dtype: DType,
    device: Any = None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    force_pow_2_scales: bool = False,
    amax_epsilon: float = 0.0,
    **unsupported: Any,
) -> _Quantizer:
    """fp8_current: one scale for the tensor, from its own amax."""
    _refuse("Float8CurrentScalingQuantizer", unsupported)
    element = _element("Float8CurrentScalingQuantizer", fp8_dtype)
    return _both(Fp8Current(element_name=element, pow2=force_pow_2_scales, amax_epsilon=amax_epsilon))


def Float8BlockQuantizer(
    fp8_dtype: DType,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = True,
    block_scaling_dim: int = 2,
    **unsupported: Any,
) -> _Quantizer:
    """fp8_block: 1x128 blocks with block_scaling_dim=1, 128x128 tiles with 2."""
    _refuse("Float8BlockQuantizer", unsupported)
    if block_scaling_dim not in (1, 2):
        raise UserError(f"Float8BlockQuantizer: block_scaling_dim is {block_scaling_dim}; it takes 1 or 2")
    element = _element("Float8BlockQuantizer", fp8_dtype)
    two_d = block_scaling_dim == 2
    return _both(Fp8Block(element_name=element, pow2=force_pow_2_scales, amax_epsilon=amax_epsilon, two_d=two_d))


def MXFP8Quantizer(
    fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True, **unsupported: Any
) -> _Quantizer:
    """mxfp8: an E8M0 scale for 32 elements."""
    _refuse("MXFP8Quantizer", unsupported)
    return _both(MX(name="mxfp8", element_name=_element("MXFP8Quantizer", fp8_dtype)))


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
    with_random_sign_mask: bool = True,
    **unsupported: Any,
) -> _Quantizer | RowwiseQuantizer:
    """nvfp4. The transform acts on the columnwise operand, and the amax is always that of the transformed values."""
    _refuse("NVFP4Quantizer", unsupported | {"with_amax_reduction": with_amax_reduction})
    if fp4_dtype is not DType.kFloat4E2M1:
        raise UserError(f"NVFP4Quantizer: fp4_dtype is {fp4_dtype}; it takes DType.kFloat4E2M1")
    if with_post_rht_amax != with_rht:
        raise UserError(
            f"NVFP4Quantizer: with_rht={with_rht} and with_post_rht_amax={with_post_rht_amax} differ; the amax here is"
            " always that of the values that are quantized, so give both the same value"
        )
    format = NVFP4(
        two_d=with_2d_quantization,
        rht=with_rht,
        rht_signed=with_random_sign_mask or not with_rht,
        sr=stochastic_rounding,
        row_scaled=row_scaled_nvfp4,
    )
    return RowwiseQuantizer(rowwise=format) if row_scaled_nvfp4 else _both(format)


@dataclass(frozen=True, kw_only=True)
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
        _refuse("DelayedScalingRequest", other)
        if self.amax_compute_algo not in ("max", "most_recent"):
            algorithm = f"amax_compute_algo is {self.amax_compute_algo!r}"
            raise UserError(f"DelayedScalingRequest: {algorithm}; it takes 'max' or 'most_recent'")
        element = self.fp8_format.value[role.tensor_type in GRADIENTS]
        options = [
            "+e5m2" if element == "e5m2" else "",
            "+most_recent" if self.amax_compute_algo == "most_recent" else "",
            "" if self.reduce_amax else "+local_amax",
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
    if dtype not in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        raise UserError(f"{where}: fp8_dtype is {dtype}; it takes DType.kFloat8E4M3 or DType.kFloat8E5M2")
    return dtype.value


def _refuse(where: str, options: dict[str, Any]) -> None:
    """UserError for options that are set and would change a number."""
    refused = [f"{name}={value!r}" for name, value in options.items() if value not in (None, False, 0)]
    if refused:
        raise UserError(f"{where}: {', '.join(refused)} has no counterpart here; leave it out")
