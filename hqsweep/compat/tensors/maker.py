"""The quantizer of a tensor that no call of a quantizer has made: a weight, a view or a copy."""

from typing import Any

from hqsweep.compat.quantizer import Called, OfFrozen, Quantizer
from hqsweep.compat.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from hqsweep.formats import MX, NVFP4, Format, Fp8Block, Fp8Current, Identity
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant import HybridQuantizer as Frozen


def quantizer_of(tensor: HybridQuantizedTensor) -> Quantizer:
    """A HybridQuantizer of the tensor's formats, whose usages are the held directions; the tensor keeps it.

    A weight whose slot calls a user's own quantizer has a copy of that one.
    """
    frozen = tensor.quantizer
    if isinstance(frozen, Called):
        made = frozen.own.copy()
    else:
        row, column = (_of_format(format) for format in (frozen.rowwise, frozen.columnwise))
        parts = {"rowwise_quantizer": row, "columnwise_quantizer": column}
        made = HybridQuantizer(**parts, columnwise_source=frozen.columnwise_source)
    made.set_usage(**tensor.get_usages())
    tensor._quantizer = made
    return made


def _of_format(format: Format) -> Quantizer:
    """A quantizer of the format; of the frozen one where TransformerEngine has none with its options."""
    made = _same_family(format)
    return made if made is not None and format in (made.rowwise, made.columnwise) else OfFrozen(Frozen(format, format))


def _same_family(format: Format) -> Quantizer | None:
    match format:
        case Identity():
            return IdentityQuantizer()
        case Fp8Current():
            options = {"force_pow_2_scales": format.pow2, "amax_epsilon": format.amax_epsilon}
            return Float8CurrentScalingQuantizer(_element(format), **options)
        case Fp8Block():
            options = {"force_pow_2_scales": format.pow2, "amax_epsilon": format.amax_epsilon}
            return Float8BlockQuantizer(_element(format), block_scaling_dim=1 + format.two_d, **options)
        case MX(name="mxfp8"):
            return MXFP8Quantizer(_element(format), with_2d_quantization=format.two_d)
        case NVFP4():
            return _nvfp4(format)
    return None


def _nvfp4(format: NVFP4) -> NVFP4Quantizer:
    return NVFP4Quantizer(
        with_rht=format.rht > 0,
        with_post_rht_amax=format.rht > 0,
        with_2d_quantization=format.two_d,
        stochastic_rounding=format.sr,
        row_scaled_nvfp4=format.row_scaled,
        nvfp4_use_4over6=format.four_over_six,
        nvfp4_e4m3_max=int(format.scale_max),
        nvfp4_4over6_err_mode=format.error_mode.upper(),
        with_random_sign_mask=format.rht_signed,
    )


def _element(format: Any) -> DType:
    return DType(format.element_name)
