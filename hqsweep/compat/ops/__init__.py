"""TransformerEngine's fusible operations, by their names: transformer_engine.pytorch.ops.

mlp = Sequential(LayerNorm(4096), Linear(4096, 28672), SwiGLU(), Linear(14336, 4096))
"""

from hqsweep.compat.ops.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from hqsweep.compat.ops.basic_linear import BasicLinear, Bias
from hqsweep.compat.ops.fuser import (
    FusedOperation,
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from hqsweep.compat.ops.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, GroupedLinear
from hqsweep.compat.ops.norms import L2Normalization, LayerNorm, RMSNorm
from hqsweep.compat.ops.op import BasicOperation, FusibleOperation
from hqsweep.compat.ops.passes import OperationContext
from hqsweep.compat.ops.sequential import Linear, Sequential
from hqsweep.compat.ops.tensors import (
    AddExtraInput,
    ConstantScale,
    Dropout,
    Identity,
    MakeExtraOutput,
    Quantize,
    Reshape,
)

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "OperationFuser",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
