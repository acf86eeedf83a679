"""TransformerEngine's names, so that a quantizer factory written for it runs here with other imports and nothing else.

    from transformer_engine.common.recipe import CustomRecipe            from hqsweep.compat import CustomRecipe
    from transformer_engine.pytorch.tensor.nvfp4_tensor import ...  ->   from hqsweep.compat import ...

Names, arguments, their order and their defaults are as in TransformerEngine d0067d0 (2.20: custom_recipes/, tensor/,
quantization.py, module/). Quantizers are objects over this package's frozen ones. In a factory's answer `rowwise` and
`columnwise` have no effect (the GEMM decides which directions are made), nor has `device`. An unsupported option that
would change a number is an error. Experimental, as roles and custom recipes are in TransformerEngine.

Modules compute in the dtype of their activations: hqsweep.compat.modules.activation_dtype. Checkpoints of
TransformerEngine's modules load: hqsweep.compat.checkpoint_keys. `hqsweep recipe export NAME --to transformer-engine`
is the way back.
"""

from hqsweep.compat import ops, optimizers
from hqsweep.compat.built_in_recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from hqsweep.compat.checkpoint_keys import transformer_engine_state_dict
from hqsweep.compat.contexts import (
    Fp8Padding,
    Fp8Unpadding,
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    post_all_gather_processing,
    quantize_master_weights,
    quantized_model_init,
)
from hqsweep.compat.factories import (
    current_scaling_factory,
    delayed_scaling_factory,
    float8_block_scaling_factory,
    high_precision_factory,
    high_precision_fwd_mxfp8_bwd_factory,
    mxfp8_factory,
    mxfp8_fwd_high_precision_bwd_factory,
    mxfp8_fwd_nvfp4_bwd_factory,
    nvfp4_1d_weight_factory,
    nvfp4_factory,
    nvfp4_linear_fp8_dpa_factory,
    nvfp4_ref_rht_2d_factory,
    nvfp4_row_scaled_fwd_high_precision_bwd_factory,
    nvfp4_row_scaled_fwd_mxfp8_bwd_factory,
)
from hqsweep.compat.modules.dot_product_attention import DotProductAttention
from hqsweep.compat.modules.grouped_linear import GroupedLinear
from hqsweep.compat.modules.layernorm_mlp import LayerNormMLP
from hqsweep.compat.modules.linear import LayerNormLinear, Linear
from hqsweep.compat.modules.multihead_attention import MultiheadAttention
from hqsweep.compat.modules.norms import LayerNorm, RMSNorm
from hqsweep.compat.modules.rope import RotaryPositionEmbedding
from hqsweep.compat.modules.transformer_layer import TransformerLayer
from hqsweep.compat.optimizers import FusedAdam, FusedSGD
from hqsweep.compat.quantizer import Quantizer, te_device_type
from hqsweep.compat.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from hqsweep.compat.recipe_states import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    RecipeState,
)
from hqsweep.compat.recipes import (
    CustomRecipe,
    DelayedScalingRequest,
    Format,
    QuantizerRequest,
    Recipe,
    get_align_size_for_quantization,
    quantizer_factory,
)
from hqsweep.compat.tensors.grouped_tensor import GroupedTensor
from hqsweep.compat.tensors.named import (
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8Tensor,
    Float8TensorStorage,
    HybridQuantizedTensorStorage,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Tensor,
    MXFP8TensorStorage,
    NVFP4Tensor,
    NVFP4TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
)
from hqsweep.quant import HybridQuantizedTensor, replace_raw_data
from hqsweep.recipe.roles import QuantizerRole

__all__ = [
    "CustomRecipe",
    "CustomRecipeState",
    "DType",
    "DelayedScaling",
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockScalingRecipeState",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8CurrentScalingRecipeState",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "Fp8Padding",
    "Fp8Unpadding",
    "FusedAdam",
    "FusedSGD",
    "GroupedLinear",
    "GroupedTensor",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8BlockScalingRecipeState",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MultiheadAttention",
    "NVFP4BlockScaling",
    "NVFP4BlockScalingRecipeState",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QParams",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "Recipe",
    "RecipeState",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "high_precision_factory",
    "high_precision_fwd_mxfp8_bwd_factory",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "mxfp8_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_factory",
    "nvfp4_linear_fp8_dpa_factory",
    "nvfp4_ref_rht_2d_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
    "ops",
    "optimizers",
    "post_all_gather_processing",
    "quantize_master_weights",
    "quantized_model_init",
    "quantizer_factory",
    "replace_raw_data",
    "te_device_type",
    "transformer_engine_state_dict",
]
