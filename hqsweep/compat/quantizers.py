"""The quantizers of TransformerEngine: one class for each format, high precision, and two formats in one."""

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor

from hqsweep.compat.arguments import flag, one_of, refuse, shown, taken
from hqsweep.compat.modules.activation_dtype import BF16, FORMATS, ToBF16
from hqsweep.compat.quantizer import OfFrozen, Quantizer, quantized
from hqsweep.errors import UserError
from hqsweep.formats import MX, NVFP4, Format, Fp8Block, Fp8Current, Fp8Delayed
from hqsweep.formats.base import divide
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant import HybridQuantizer as Frozen
from hqsweep.quant.content import OneMatrix
from hqsweep.quant.hybrid import DIRECTIONS
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.quant.usage import Metadata


class DType(Enum):
    """Element types. Quantizers take the three of codes."""

    kByte = "uint8"
    kInt16 = "int16"
    kInt32 = "int32"
    kInt64 = "int64"
    kFloat32 = "float32"
    kFloat16 = "float16"
    kBFloat16 = "bfloat16"
    kFloat8E4M3 = "e4m3"
    kFloat8E5M2 = "e5m2"
    kFloat8E8M0 = "e8m0"
    kFloat4E2M1 = "e2m1"


class IdentityQuantizer(Quantizer):
    """High precision in `dtype`, to which values are rounded. None is the dtype of the tensor, and in a slot "bf16".

    "bf16" is the dtype of activations in modules of hqsweep.compat, and bfloat16 in linears of hqsweep.nn.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype
        self._format()

    def quantize_impl(self, tensor: Tensor) -> Tensor:
        return super().quantize_impl(tensor if self.dtype is None else tensor.to(self.dtype))

    def make_empty(self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        return super().make_empty(shape, dtype=self.dtype or dtype, **options)

    def _format(self) -> Format:
        if self.dtype is None:
            return BF16
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in FORMATS:
            raise UserError(f"IdentityQuantizer: dtype is {shown(self.dtype)}; it takes bfloat16, float16 or float32")
        return ToBF16() if self.dtype is torch.bfloat16 else FORMATS[self.dtype]


class Float8Quantizer(Quantizer):
    """FP8 under a scale that the caller gives, float32 [1]: code = x * scale, scale_inv = 1 / scale. Each call writes
    the tensor's largest magnitude to amax.

    Its tensors are written again under its scale of that time; copies and views only by update_quantized(). As a
    factory's answer it keeps the scale for as long as
    the caller does; DelayedScalingRequest has a history.
    """

    rowwise_gather_only, requantizes_alike = True, False

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype
        self._format()

    is_plain = False

    def quantize_impl(self, tensor: Tensor) -> Tensor:
        return self.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).quantize_(tensor.detach())

    def make_empty(self, shape: Iterable[int], **options: Any) -> Tensor:
        made = super().make_empty(shape, **options)
        made.encode = self._encode
        return made

    def update_quantized(self, src: Tensor, dst: Tensor, *, noop_flag: Tensor | None = None) -> Tensor:
        if not isinstance(dst, HybridQuantizedTensor) or dst.quantizer != self.frozen:
            raise UserError(f"Float8Quantizer cannot update {shown(dst)}; it takes a tensor of a Float8Quantizer")
        dst.encode = self._encode
        return dst.quantize_(src.detach(), noop_flag=noop_flag)

    def _encode(self, x: Tensor, *_: Any) -> HybridOperand:
        """The operands of values [..., cols] under the scale."""
        self.calibrate(x)
        format, scale = self._format(), self.scale.detach().float().reshape(1, 1)
        x = x.reshape(OneMatrix.of(x.shape)[0].matrix)
        codes, inverse = format.element.encode(x.float() * scale), divide(1.0, scale)
        row, column = (
            Operand(format=format, shape=tuple(q.shape), dtype=x.dtype, buffers={"q": q, "s": inverse})
            for q in (codes, codes.t())
        )
        return HybridOperand(rowwise=row, columnwise=column)

    def calibrate(self, tensor: Tensor) -> None:
        """Write the tensor's largest magnitude to amax."""
        if tensor.numel():
            self.amax.copy_(tensor.detach().abs().amax().float())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _format(self) -> Format:
        return Fp8Delayed(element_name=_element("Float8Quantizer", self.dtype))


class Float8CurrentScalingQuantizer(Quantizer):
    """fp8_current: one scale for the tensor, from its own amax. device, use_existing_amax, scale and amax have no
    effect, as in TransformerEngine."""

    rowwise_gather_only = True

    def __init__(
        self,
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
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if flag(type(self).__name__, "use_existing_amax", use_existing_amax) or scale is not None or amax is not None:
            text = "Float8CurrentScalingQuantizer: use_existing_amax, scale and amax have no effect; leave them out"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        self.dtype, self.force_pow_2_scales, self.amax_epsilon = fp8_dtype, force_pow_2_scales, amax_epsilon
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self._format()

    def _format(self) -> Format:
        kind = "Float8CurrentScalingQuantizer"
        refuse(kind, {"with_amax_reduction": self.with_amax_reduction})
        taken(kind, "amax_epsilon", self.amax_epsilon, 0.0)
        pow2 = flag(kind, "force_pow_2_scales", self.force_pow_2_scales)
        return Fp8Current(element_name=_element(kind, self.dtype), pow2=pow2, amax_epsilon=self.amax_epsilon)


class Float8BlockQuantizer(Quantizer):
    """fp8_block: 1x128 blocks with block_scaling_dim=1, 128x128 tiles with 2."""

    block = block_len = 128

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.amax_epsilon, self.force_pow_2_scales = fp8_dtype, amax_epsilon, force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        self._format()

    def _format(self) -> Format:
        kind = "Float8BlockQuantizer"
        one_of(kind, "block_scaling_dim", self.block_scaling_dim, (1, 2))
        taken(kind, "amax_epsilon", self.amax_epsilon, 0.0)
        options = {"pow2": flag(kind, "force_pow_2_scales", self.force_pow_2_scales)}
        options |= {"two_d": self.block_scaling_dim == 2, "amax_epsilon": self.amax_epsilon}
        return Fp8Block(element_name=_element(kind, self.dtype), **options)


class MXFP8Quantizer(Quantizer):
    """mxfp8: an E8M0 scale for 32 elements, or for tiles of 32x32."""

    block = 32

    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.with_2d_quantization = fp8_dtype, with_2d_quantization
        self._format()

    def _format(self) -> Format:
        kind = "MXFP8Quantizer"
        two_d = flag(kind, "with_2d_quantization", self.with_2d_quantization)
        return MX(name="mxfp8", element_name=_element(kind, self.dtype), two_d=two_d)


class NVFP4Quantizer(Quantizer):
    """nvfp4. The transform acts on the columnwise operand, and the amax is always the transformed values'.

    nvfp4_e4m3_max (448 or 256) and nvfp4_4over6_err_mode ("MAE" or "MSE") set how nvfp4_use_4over6 decides; without it
    they have no effect. row_scaled_nvfp4 is for rowwise operands: of a HybridQuantizer, or with columnwise=False.
    """

    block = 16

    def __init__(
        self,
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
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype, self.with_rht, self.with_post_rht_amax = fp4_dtype, with_rht, with_post_rht_amax
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
        self.row_scaled_nvfp4, self.nvfp4_use_4over6 = row_scaled_nvfp4, nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max
        self.nvfp4_4over6_err_mode, self.with_random_sign_mask = nvfp4_4over6_err_mode, with_random_sign_mask
        self._format()

    @property
    def frozen(self) -> Frozen:
        format = self._format()
        if format.row_scaled:
            raise UserError(f"{format} is for rowwise operands only; make it rowwise_quantizer of a HybridQuantizer")
        return Frozen(format.rowwise_form, format)

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    def is_quantizable(self, inp: Tensor) -> bool:
        return not self.row_scaled_nvfp4 and super().is_quantizable(inp)

    def _of_call(self) -> Frozen:
        format = self._format()
        if not format.row_scaled or self.columnwise_usage:
            return self.frozen
        return Frozen(format, replace(format, row_scaled=False))  # of which only the rowwise operand is made

    def _format(self) -> NVFP4:
        kind = "NVFP4Quantizer"
        names = ("with_rht", "with_post_rht_amax", "with_2d_quantization", "stochastic_rounding", "row_scaled_nvfp4")
        names += ("nvfp4_use_4over6", "with_random_sign_mask")
        refuse(kind, {"with_amax_reduction": self.with_amax_reduction})
        one_of(kind, "fp4_dtype", self.dtype, (DType.kFloat4E2M1,))
        chosen = {name: flag(kind, name, getattr(self, name)) for name in names}
        if chosen["with_post_rht_amax"] != chosen["with_rht"]:
            raise UserError(
                f"{kind}: with_rht={self.with_rht} and with_post_rht_amax={self.with_post_rht_amax} differ; the amax"
                " here is always that of the values that are quantized, so give both the same value"
            )
        return NVFP4(
            two_d=chosen["with_2d_quantization"],
            rht=16 if chosen["with_rht"] else 0,
            rht_signed=chosen["with_random_sign_mask"] or not chosen["with_rht"],
            sr=chosen["stochastic_rounding"],
            row_scaled=chosen["row_scaled_nvfp4"],
            **self._four_over_six(chosen["nvfp4_use_4over6"]),
        )

    def _four_over_six(self, used: bool) -> dict[str, Any]:
        kind, mode = "NVFP4Quantizer", self.nvfp4_4over6_err_mode
        mode = mode.upper() if isinstance(mode, str) else mode
        one_of(kind, "nvfp4_4over6_err_mode", mode, ("MAE", "MSE"))
        if not used:
            return {}
        one_of(kind, "nvfp4_e4m3_max", self.nvfp4_e4m3_max, (448, 256))
        e4m3_max = 448 if self.nvfp4_e4m3_max == 448 else 0  # 256 is the format's default
        return {"four_over_six": True, "error_mode": mode.lower(), "e4m3_max": e4m3_max}


class NoQuantizer(UserError, TypeError):
    """A part of a HybridQuantizer is no quantizer. It is a TypeError, as in TransformerEngine."""


class HybridQuantizer(Quantizer):
    """The rowwise format of the one and the columnwise format of the other, whose usages it sets. A part may also be a
    HybridQuantizer of hqsweep.quant."""

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer | Frozen,
        columnwise_quantizer: Quantizer | Frozen,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        for name, quantizer in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            if not isinstance(quantizer, Quantizer | Frozen):
                what = f"{name}_quantizer is {quantizer!r}"
                raise NoQuantizer(f"HybridQuantizer does not support nested QuantizerRequest: {what}; give a quantizer")
        if rowwise_quantizer is columnwise_quantizer and isinstance(rowwise_quantizer, Quantizer):
            raise UserError("HybridQuantizer: requires distinct rowwise and columnwise quantizers; give a copy()")
        self.rowwise_quantizer, self.columnwise_quantizer = (
            OfFrozen(part) if isinstance(part, Frozen) else part for part in (rowwise_quantizer, columnwise_quantizer)
        )
        self.columnwise_source = columnwise_source
        self.rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        self.columnwise_quantizer.set_usage(rowwise=False, columnwise=True)
        if all(part.has_format for part in (self.rowwise_quantizer, self.columnwise_quantizer)):
            _ = self.frozen  # whose faults are raised now

    @property
    def frozen(self) -> Frozen:
        return Frozen(self.rowwise, self.columnwise_quantizer.columnwise, self.columnwise_source)

    @property
    def rowwise(self) -> Format:
        return self.rowwise_quantizer.rowwise

    @property
    def is_plain(self) -> bool:
        return super().is_plain and self.rowwise_quantizer.is_plain and self.columnwise_quantizer.is_plain

    def quantize_impl(self, tensor: Tensor) -> Tensor:
        """As the base's, or by the parts' own methods if a part has some."""
        plain = self.rowwise_quantizer.is_plain and self.columnwise_quantizer.is_plain
        if plain or not self._directions():
            return super().quantize_impl(tensor)
        decodes = self.columnwise_usage and self.columnwise_source == "rowwise_dequantized"
        row = column = None
        if self.rowwise_usage or decodes:
            row = quantized(self.rowwise_quantizer, self.rowwise_quantizer.quantize(tensor))
        if self.columnwise_usage:
            source = row.dequantize(dtype=tensor.dtype) if decodes else tensor
            column = quantized(self.columnwise_quantizer, self.columnwise_quantizer.quantize(source))
        return self._joined(row if self.rowwise_usage else None, column, tensor)

    def update_quantized(self, src: Tensor, dst: Tensor, *, noop_flag: Tensor | None = None) -> Tensor:
        """As the base's, in the held directions that have a usage."""
        used = set(self._directions())
        if not isinstance(dst, HybridQuantizedTensor) or set(dst.metadata.directions) <= used:
            return super().update_quantized(src, dst, noop_flag=noop_flag)
        for part in (getattr(dst, f"{d}_sub_storage") for d in dst.metadata.directions if d in used):
            super().update_quantized(src, part, noop_flag=noop_flag)
        return dst

    def _joined(self, row: Any, column: Any, tensor: Tensor) -> HybridQuantizedTensor:
        """One tensor of the rowwise operand of the one and the columnwise operand of the other, without a copy."""
        held = {d: made for d, made in zip(DIRECTIONS, (row, column), strict=True) if made is not None}
        either = row if column is None else column
        formats = [getattr(held.get(direction, either).quantizer, direction) for direction in DIRECTIONS]
        content, shape = OneMatrix.of(tuple(tensor.shape))
        options = {"dtype": tensor.dtype, "directions": tuple(held)}
        metadata = Metadata.of(content, Frozen(*formats, self.columnwise_source), **options)
        buffers = {f"{d}_{name}": getattr(held[d], d).buffers[name] for d, name in metadata.stored}
        return HybridQuantizedTensor(buffers, metadata, shape)

    def copy(self) -> Self:
        """A quantizer with the same attributes and copies of both parts."""
        made = copy.copy(self)
        made.rowwise_quantizer = self.rowwise_quantizer.copy()
        made.columnwise_quantizer = self.columnwise_quantizer.copy()
        return made

    def is_requantization_safe(self) -> bool:
        reads_row = self.rowwise_usage or (self.columnwise_usage and self.columnwise_source != "original")
        row, column = self.rowwise_quantizer, self.columnwise_quantizer
        return (not reads_row or row.is_requantization_safe()) and (
            not self.columnwise_usage or column.is_requantization_safe()
        )

    def supports_only_rowwise_all_gather(self) -> bool:
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or isinstance(
            self.columnwise_quantizer, NVFP4Quantizer
        )


def _element(where: str, dtype: DType) -> str:
    one_of(where, "fp8_dtype", dtype, (DType.kFloat8E4M3, DType.kFloat8E5M2))
    return dtype.value
