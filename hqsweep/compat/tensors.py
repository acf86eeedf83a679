"""Quantized tensors by TransformerEngine's names, for isinstance.

All quantized tensors are HybridQuantizedTensor here, whatever made them. The names of formats are asked by isinstance
only: Float8Tensor is a tensor whose held directions are all FP8 with one scale, and so on. Storages are tensors, too.
"""

from typing import Any, ClassVar

from hqsweep.errors import UserError
from hqsweep.formats import MX, NVFP4, Format, Fp8Block, Identity
from hqsweep.formats.fp8 import Fp8PerTensor
from hqsweep.quant import HybridQuantizedTensor


class _OfFormat(type):
    formats: ClassVar[type[Format]]

    def __instancecheck__(cls, tensor: Any) -> bool:
        if not isinstance(tensor, HybridQuantizedTensor):
            return False
        formats = [getattr(tensor.quantizer, direction) for direction in tensor.metadata.directions]
        return all(isinstance(format, cls.formats) and format.name in (cls.named or format.name) for format in formats)

    def __call__(cls, *_: Any, **__: Any) -> None:
        raise UserError(f"{cls.__name__} is asked by isinstance only; make a tensor by calling a quantizer")


class Float8Tensor(metaclass=_OfFormat):
    """FP8 with one scale for the tensor."""

    formats, named = Fp8PerTensor, ()


class Float8BlockwiseQTensor(metaclass=_OfFormat):
    """FP8 with a scale for each block or tile."""

    formats, named = Fp8Block, ()


class MXFP8Tensor(metaclass=_OfFormat):
    """MXFP8."""

    formats, named = MX, ("mxfp8",)


class NVFP4Tensor(metaclass=_OfFormat):
    """NVFP4."""

    formats, named = NVFP4, ()


class IdentityTensor(metaclass=_OfFormat):
    """High precision."""

    formats, named = Identity, ()


QuantizedTensor = QuantizedTensorStorage = HybridQuantizedTensorStorage = HybridQuantizedTensor
Float8TensorStorage, Float8BlockwiseQTensorStorage = Float8Tensor, Float8BlockwiseQTensor
MXFP8TensorStorage, NVFP4TensorStorage, IdentityTensorStorage = MXFP8Tensor, NVFP4Tensor, IdentityTensor
