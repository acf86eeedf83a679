"""The tensor classes of TransformerEngine, by their names. All quantized tensors are HybridQuantizedTensor here.

A name is asked by isinstance: Float8Tensor is a tensor whose held directions are all FP8 with one scale, and so on.
Float8Tensor and IdentityTensor are also made of buffers. Storages are tensors, too; what an internal quantizer returns
is only asked by the name of a storage.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hqsweep.compat.arguments import one_of, shown
from hqsweep.compat.modules.activation_dtype import FORMATS
from hqsweep.compat.quantizer import Quantizer
from hqsweep.compat.quantizers import DType
from hqsweep.compat.tensors.maker import quantizer_of
from hqsweep.errors import UserError
from hqsweep.formats import MX, NVFP4, Format, Fp8Block, Fp8Current, Identity
from hqsweep.formats.fp8 import Fp8PerTensor
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant import HybridQuantizer as Frozen
from hqsweep.quant.content import OneMatrix
from hqsweep.quant.usage import FIELDS, Metadata


class _OfFormat(type):
    formats: ClassVar[type[Format]]
    named: ClassVar[tuple[str, ...]]
    made: ClassVar[Callable[..., Tensor] | None] = None
    """The constructor of buffers."""
    is_storage: ClassVar[bool] = False

    def __instancecheck__(cls, tensor: Any) -> bool:
        if not isinstance(tensor, HybridQuantizedTensor):
            return False
        if not cls.is_storage and getattr(vars(tensor).get("_quantizer"), "internal", False):
            return False
        formats = [getattr(tensor.quantizer, direction) for direction in tensor.metadata.directions]
        return all(isinstance(format, cls.formats) and format.name in (cls.named or format.name) for format in formats)

    def __call__(cls, *positional: Any, **named: Any) -> Tensor:
        if cls.made is None:
            raise UserError(f"{cls.__name__} is asked by isinstance only; make a tensor by calling a quantizer")
        return cls.made(*positional, **named)


def _float8(
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    data: Tensor | None = None,
    fp8_scale_inv: Tensor | None = None,
    fp8_dtype: DType = DType.kFloat8E4M3,
    requires_grad: bool = False,
    data_transpose: Tensor | None = None,
    quantizer: Quantizer | None = None,
    device: Any = None,
    fake_dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of codes uint8: data [..., cols] rowwise, data_transpose [cols, ...] columnwise; at least one of them.

    fp8_scale_inv: float32 [1]. dtype, or fake_dtype: of the values. device has no effect. UserError for missing codes,
    and for buffers that do not fit.
    """
    held = {"rowwise": data, "columnwise": data_transpose}
    held = {direction: codes for direction, codes in held.items() if codes is not None}
    if not held or fp8_scale_inv is None:
        raise UserError("Float8Tensor: fp8_scale_inv, and data or data_transpose are missing")
    if shape is None:
        shape = data.shape if data is not None else (*data_transpose.shape[1:], data_transpose.shape[0])
    one_of("Float8Tensor", "fp8_dtype", fp8_dtype, (DType.kFloat8E4M3, DType.kFloat8E5M2))
    content, scale = OneMatrix.of(tuple(shape))[0], fp8_scale_inv.reshape(1, 1)
    for codes in held.values():
        if codes.numel() != math.prod(shape):
            what = f"data {list(codes.shape)} does not have the {math.prod(shape)} elements of {list(shape)}"
            raise UserError(f"Float8Tensor: {what}")
    buffers = {f"{direction}_q": codes.reshape(content.shape(direction)) for direction, codes in held.items()}
    buffers |= {f"{direction}_s": scale for direction in held}
    format = Fp8Current(element_name=fp8_dtype.value)
    own = Frozen(format, format) if quantizer is None else quantizer.frozen
    return _of_buffers("Float8Tensor", tuple(shape), fake_dtype or dtype, own, buffers, quantizer, requires_grad)


def _identity(
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    hp_data: Tensor | None = None,
    quantizer: Quantizer | None = None,
    requires_grad: bool = False,
    device: Any = None,
    fake_dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the values hp_data, float32, float16 or bfloat16, whose nominal dtype is dtype, or fake_dtype.

    device has no effect. UserError for missing values.
    """
    if hp_data is None or hp_data.dtype not in FORMATS:
        raise UserError(f"IdentityTensor: hp_data is {shown(hp_data)}; it takes float32, float16 or bfloat16")
    shape, format = hp_data.shape if shape is None else tuple(shape), FORMATS[hp_data.dtype]
    buffers = {"rowwise_q": hp_data.reshape(OneMatrix.of(shape)[0].matrix)}
    dtype = fake_dtype or dtype or hp_data.dtype
    return _of_buffers("IdentityTensor", shape, dtype, Frozen(format, format), buffers, quantizer, requires_grad)


def _of_buffers(
    kind: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    frozen: Frozen,
    buffers: Mapping[str, Tensor],
    quantizer: Quantizer | None,
    requires_grad: bool,
) -> Tensor:
    directions = [name.split("_")[0] for name in buffers]
    if frozen.rowwise.high_precision:
        directions = ["rowwise", "columnwise"]
    metadata = Metadata.of(OneMatrix.of(shape)[0], frozen, dtype=dtype, directions=directions)
    try:
        metadata.check(buffers)
    except UserError as error:
        raise UserError(f"{kind}: {error}") from None
    made = HybridQuantizedTensor(buffers, metadata, shape)
    if quantizer is not None:
        made._quantizer = quantizer
    return made.requires_grad_(requires_grad)


class Float8TensorStorage(metaclass=_OfFormat):
    """FP8 with one scale for the tensor."""

    formats, named, made, is_storage = Fp8PerTensor, (), _float8, True


class Float8Tensor(Float8TensorStorage):
    """As Float8TensorStorage, with gradients."""

    is_storage = False


class Float8BlockwiseQTensorStorage(metaclass=_OfFormat):
    """FP8 with a scale for each block or tile."""

    formats, named, is_storage = Fp8Block, (), True


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage):
    """As Float8BlockwiseQTensorStorage, with gradients."""

    is_storage = False


class MXFP8TensorStorage(metaclass=_OfFormat):
    """MXFP8."""

    formats, named, is_storage = MX, ("mxfp8",), True


class MXFP8Tensor(MXFP8TensorStorage):
    """As MXFP8TensorStorage, with gradients."""

    is_storage = False


class NVFP4TensorStorage(metaclass=_OfFormat):
    """NVFP4."""

    formats, named, is_storage = NVFP4, (), True


class NVFP4Tensor(NVFP4TensorStorage):
    """As NVFP4TensorStorage, with gradients."""

    is_storage = False


class IdentityTensorStorage(metaclass=_OfFormat):
    """High precision."""

    formats, named, made, is_storage = Identity, (), _identity, True


class IdentityTensor(IdentityTensorStorage):
    """As IdentityTensorStorage, with gradients."""

    is_storage = False


QuantizedTensor = QuantizedTensorStorage = HybridQuantizedTensorStorage = HybridQuantizedTensor

FIELDS["_quantizer"] = quantizer_of
