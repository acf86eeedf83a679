"""TransformerEngine's factories by their names: six of one format each, and seven that combine formats by tensor.

Each gives the quantizers of the packaged recipe of its name.
"""

from hqsweep.compat.quantizer import Quantizer
from hqsweep.compat.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from hqsweep.compat.recipes import DelayedScalingRequest
from hqsweep.recipe.roles import QuantizerRole

Role = QuantizerRole | None


def high_precision_factory(role: Role) -> IdentityQuantizer:
    """No quantization."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: Role) -> DelayedScalingRequest:
    """FP8 with delayed scaling, gradients in E5M2."""
    return DelayedScalingRequest()


def current_scaling_factory(role: Role) -> Float8CurrentScalingQuantizer:
    """FP8 with current scaling, gradients in E5M2."""
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if _is(role, "grad_output") else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: Role) -> Float8BlockQuantizer:
    """FP8 with power-of-two scales for blocks, and for tiles of weights."""
    return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=2 if _is(role, "weight") else 1)


def mxfp8_factory(role: Role) -> MXFP8Quantizer:
    """MXFP8 everywhere."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: Role) -> NVFP4Quantizer:
    """NVFP4: tiles for weights; elsewhere the Hadamard transform, with stochastic rounding of gradients."""
    if _is(role, "weight"):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=_is(role, "grad_output"))


def high_precision_fwd_mxfp8_bwd_factory(role: Role) -> Quantizer:
    """High precision in fprop, MXFP8 in dgrad and wgrad."""
    if _linear(role) == "grad_output":
        return mxfp8_factory(role)
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=mxfp8_factory(role))


def mxfp8_fwd_nvfp4_bwd_factory(role: Role) -> Quantizer:
    """MXFP8 in fprop, NVFP4 in dgrad and wgrad; the weight is quantized twice."""
    tensor = _linear(role)
    if tensor == "grad_output":
        return nvfp4_factory(role)
    if tensor == "input":
        return HybridQuantizer(rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=nvfp4_factory(role))
    return _twice(mxfp8_factory(role), NVFP4Quantizer()) if tensor == "weight" else mxfp8_factory(role)


def nvfp4_1d_weight_factory(role: Role) -> Quantizer:
    """NVFP4 with 1x16 blocks for weights, too; the weight of dgrad is quantized from that of fprop."""
    return _twice(NVFP4Quantizer(), NVFP4Quantizer()) if _linear(role) == "weight" else nvfp4_factory(role)


def nvfp4_ref_rht_2d_factory(role: Role) -> Quantizer:
    """NVFP4 without stochastic rounding: tiles for weights of linears, the Hadamard transform for all else."""
    if _linear(role) == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)


def mxfp8_fwd_high_precision_bwd_factory(role: Role) -> Quantizer:
    """MXFP8 in fprop; backward in high precision, from the values of fprop."""
    if _linear(role) in ("input", "weight"):
        return _twice(mxfp8_factory(role), IdentityQuantizer())
    return IdentityQuantizer() if _linear(role) == "grad_output" else mxfp8_factory(role)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: Role) -> Quantizer:
    """Experts: NVFP4 in fprop, with one scale for each row of inputs, and MXFP8 from its values. All else: MXFP8."""
    if role is not None and role.module_type == "grouped_linear" and role.tensor_type in ("input", "weight"):
        return _twice(NVFP4Quantizer(row_scaled_nvfp4=role.tensor_type == "input"), mxfp8_factory(role))
    return mxfp8_factory(role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: Role) -> Quantizer:
    """NVFP4 in fprop, with one scale for each row of inputs; backward in high precision, from the values of fprop."""
    tensor = _linear(role)
    if tensor in ("input", "weight"):
        return _twice(NVFP4Quantizer(row_scaled_nvfp4=tensor == "input"), IdentityQuantizer())
    return IdentityQuantizer() if tensor == "grad_output" else NVFP4Quantizer()


def nvfp4_linear_fp8_dpa_factory(role: Role) -> Quantizer | DelayedScalingRequest:
    """NVFP4 linears and FP8 attention, for CustomRecipe(..., fp8_dpa=True)."""
    attention = role is not None and role.module_type == "dpa"
    if attention and role.tensor_type in ("s", "dp"):
        return DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    boundary = role is not None and not role.module_type and role.name.endswith(("dpa_output", "dpa_grad_input"))
    if attention or boundary:
        gradient = role.tensor_type == "do" or "dpa_grad_input" in role.name
        return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3)
    return nvfp4_factory(role)


def _twice(rowwise: Quantizer, columnwise: Quantizer) -> HybridQuantizer:
    """The columnwise operand is made from the rowwise one."""
    return HybridQuantizer(
        rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source="rowwise_dequantized"
    )


def _is(role: Role, tensor_type: str) -> bool:
    return role is not None and role.tensor_type == tensor_type


def _linear(role: Role) -> str | None:
    """The tensor of a linear or of experts; None for any other slot."""
    return role.tensor_type if role is not None and role.module_type in ("linear", "grouped_linear") else None
