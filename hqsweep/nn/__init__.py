"""Modules whose matrix products run on quantized operands."""

from hqsweep.nn.core.context import autocast, quantization, recomputed
from hqsweep.nn.core.module import QuantizedModule, set_recipe
from hqsweep.nn.core.options import (
    AttentionOptions,
    GroupedLinearOptions,
    LayerNormLinearOptions,
    LinearOptions,
    MLPOptions,
    MoELayerOptions,
    MoEOptions,
    TransformerOptions,
    quantized_model_init,
)
from hqsweep.nn.core.probe import Probe
from hqsweep.nn.dot_product_attention import DotProductAttention
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.layernorm_linears import LayerNormLinear, LayerNormMLP
from hqsweep.nn.linear_loss import linear_cross_entropy
from hqsweep.nn.linears import Linear
from hqsweep.nn.saved_memory import ActivationOffload
from hqsweep.nn.transformer import LayerNormMoE, MoELayer, MultiheadAttention, TransformerLayer

__all__ = [
    "ActivationOffload",
    "AttentionOptions",
    "DotProductAttention",
    "GroupedLinear",
    "GroupedLinearOptions",
    "LayerNormLinear",
    "LayerNormLinearOptions",
    "LayerNormMLP",
    "LayerNormMoE",
    "Linear",
    "LinearOptions",
    "MLPOptions",
    "MoELayer",
    "MoELayerOptions",
    "MoEOptions",
    "MultiheadAttention",
    "Probe",
    "QuantizedModule",
    "TransformerLayer",
    "TransformerOptions",
    "autocast",
    "linear_cross_entropy",
    "quantization",
    "quantized_model_init",
    "recomputed",
    "set_recipe",
]
