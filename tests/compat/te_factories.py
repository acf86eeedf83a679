"""The fourteen factories of TransformerEngine's documentation, written against its API: real imports, real arguments.

This file is data, not a test helper: test_quantizers.py beside it replaces its imports and runs it. One factory for
each row of the table of custom_recipes/ (d0067d0), and the one in the docstring of DotProductAttention.
"""

import torch
from transformer_engine import te_device_type
from transformer_engine.common.recipe import Format, quantizer_factory
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import DelayedScalingRequest, QuantizerRole
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer


def tensor_of_linear(role: QuantizerRole | None) -> str | None:
    return role.tensor_type if role is not None and role.module_type in ("linear", "grouped_linear") else None


def plain_nvfp4(row_scaled: bool = False):
    return NVFP4Quantizer(
        fp4_dtype=DType.kFloat4E2M1, with_rht=False, with_post_rht_amax=False, with_2d_quantization=False,
        stochastic_rounding=False, row_scaled_nvfp4=row_scaled,
    )  # fmt: skip


def high_precision(role):
    return IdentityQuantizer()


def delayed_scaling(role):
    return DelayedScalingRequest(fp8_format=Format.HYBRID)


def current_scaling(role):
    gradient = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(
        fp8_dtype=DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3, device=torch.device(te_device_type()),
        force_pow_2_scales=False, amax_epsilon=0.0,
    )  # fmt: skip


def float8_block_scaling(role):
    return Float8BlockQuantizer(
        fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=True, amax_epsilon=0.0, force_pow_2_scales=True,
        block_scaling_dim=2 if tensor_of_linear(role) == "weight" else 1,
    )  # fmt: skip


def mxfp8(role):
    return MXFP8Quantizer(fp8_dtype=DType.kFloat8E4M3)


def nvfp4(role):
    weight = tensor_of_linear(role) == "weight"
    return NVFP4Quantizer(
        fp4_dtype=DType.kFloat4E2M1, with_rht=not weight, with_post_rht_amax=not weight, with_2d_quantization=weight,
        stochastic_rounding=tensor_of_linear(role) == "grad_output", with_random_sign_mask=True,
    )  # fmt: skip


@quantizer_factory(key=("high_precision_fwd_mxfp8_bwd", 1))
def high_precision_fwd_mxfp8_bwd(role):
    if tensor_of_linear(role) == "grad_output":
        return mxfp8(role)
    return HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=mxfp8(role))


@quantizer_factory(key=("mxfp8_fwd_nvfp4_bwd", 1))
def mxfp8_fwd_nvfp4_bwd(role):
    match tensor_of_linear(role):
        case "input":
            return HybridQuantizer(
                rowwise_quantizer=mxfp8(role), columnwise_quantizer=nvfp4(role), columnwise_source="original"
            )
        case "weight":
            return HybridQuantizer(
                rowwise_quantizer=mxfp8(role),
                columnwise_quantizer=plain_nvfp4(),
                columnwise_source="rowwise_dequantized",
            )
        case "grad_output":
            return nvfp4(role)
    return mxfp8(role)


@quantizer_factory(key=("nvfp4_1d_weight", 1))
def nvfp4_1d_weight(role):
    if tensor_of_linear(role) == "weight":
        return HybridQuantizer(
            rowwise_quantizer=plain_nvfp4(),
            columnwise_quantizer=plain_nvfp4(),
            columnwise_source="rowwise_dequantized",
        )
    return nvfp4(role)


@quantizer_factory(key=("mxfp8_fwd_high_precision_bwd", 1))
def mxfp8_fwd_high_precision_bwd(role):
    if tensor_of_linear(role) in ("input", "weight"):
        return HybridQuantizer(
            rowwise_quantizer=mxfp8(role),
            columnwise_quantizer=IdentityQuantizer(),
            columnwise_source="rowwise_dequantized",
        )
    return IdentityQuantizer() if tensor_of_linear(role) == "grad_output" else mxfp8(role)


@quantizer_factory(key=("composer2", 1))
def nvfp4_row_scaled_fwd_mxfp8_bwd(role):
    if role is not None and role.module_type == "grouped_linear" and role.tensor_type in ("input", "weight"):
        return HybridQuantizer(
            rowwise_quantizer=plain_nvfp4(row_scaled=role.tensor_type == "input"),
            columnwise_quantizer=mxfp8(role),
            columnwise_source="rowwise_dequantized",
        )
    return mxfp8(role)


@quantizer_factory(key=("nvfp4_row_scaled_fwd_high_precision_bwd", 1))
def nvfp4_row_scaled_fwd_high_precision_bwd(role):
    tensor = tensor_of_linear(role)
    if tensor in ("input", "weight"):
        return HybridQuantizer(
            rowwise_quantizer=plain_nvfp4(row_scaled=tensor == "input"),
            columnwise_quantizer=IdentityQuantizer(),
            columnwise_source="rowwise_dequantized",
        )
    return IdentityQuantizer() if tensor == "grad_output" else plain_nvfp4()


@quantizer_factory(key=("nvfp4_linear_fp8_dpa", 1))
def nvfp4_linear_fp8_dpa(role):
    """For CustomRecipe(..., fp8_dpa=True)."""
    attention = role is not None and role.module_type == "dpa"
    if attention and role.tensor_type in ("s", "dp"):
        return DelayedScalingRequest(
            fp8_format=Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=True
        )
    boundary = role is not None and not role.module_type and role.name.endswith(("dpa_output", "dpa_grad_input"))
    if attention or boundary:
        gradient = role.tensor_type == "do" or "dpa_grad_input" in role.name
        return Float8CurrentScalingQuantizer(
            fp8_dtype=DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3, device="cuda"
        )
    return nvfp4(role)


@quantizer_factory(key=("nvfp4_linear_mxfp8_dpa", 1))
def nvfp4_linear_mxfp8_dpa(role):
    """For CustomRecipe(..., fp8_dpa=True)."""
    attention = role is not None and role.module_type == "dpa"
    boundary = role is not None and not role.module_type and role.name.endswith(("dpa_output", "dpa_grad_input"))
    if attention or boundary:
        gradient = role.tensor_type in ("do", "dp", "dqkv") if attention else "dpa_grad_input" in role.name
        return MXFP8Quantizer(fp8_dtype=DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3)
    return nvfp4(role)
