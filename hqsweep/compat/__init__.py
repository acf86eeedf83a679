"""TransformerEngine's names, so that a quantizer factory written for it runs here with other imports and nothing else.

    from transformer_engine.common.recipe import CustomRecipe            from hqsweep.compat import CustomRecipe
    from transformer_engine.pytorch.tensor.nvfp4_tensor import ...  ->   from hqsweep.compat import ...

Names, arguments, their order and their defaults are as in TransformerEngine d0067d0 (2.20: custom_recipes/, tensor/,
quantization.py, module/). Calls of quantizers return this package's frozen quantizers. Two kinds of arguments have no
effect here: `rowwise` and `columnwise` (the GEMM decides which directions are made), and `device`. An unsupported
option that would change a number is an error. Roles and custom recipes are experimental, as they are there.

Modules compute in the dtype of their activations: hqsweep.compat.activation_dtype. Checkpoints of TransformerEngine's
modules load: hqsweep.compat.checkpoint_keys. `hqsweep recipe export NAME --to transformer-engine` is the way back.
"""

from hqsweep.compat.checkpoint_keys import transformer_engine_state_dict
from hqsweep.compat.grouped_linear import GroupedLinear
from hqsweep.compat.layers import LayerNormMLP, MultiheadAttention, TransformerLayer
from hqsweep.compat.linear import LayerNormLinear, Linear
from hqsweep.compat.quantizers import (
    CustomRecipe,
    DelayedScalingRequest,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Format,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    autocast,
    current_scaling_factory,
    delayed_scaling_factory,
    float8_block_scaling_factory,
    high_precision_factory,
    mxfp8_factory,
    nvfp4_factory,
    quantized_model_init,
    quantizer_factory,
    te_device_type,
)
from hqsweep.quant import GroupedTensor
from hqsweep.recipe.roles import QuantizerRole

__all__ = [
    "CustomRecipe",
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Format",
    "GroupedLinear",
    "GroupedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "QuantizerRole",
    "TransformerLayer",
    "autocast",
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
    "quantized_model_init",
    "quantizer_factory",
    "te_device_type",
    "transformer_engine_state_dict",
]
