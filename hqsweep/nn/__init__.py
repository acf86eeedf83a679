"""Modules whose matrix products run on quantized operands."""

from hqsweep.nn.attention import DotProductAttention
from hqsweep.nn.context import autocast, quantization
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.nn.layernorm_linear import LayerNormLinear
from hqsweep.nn.layernorm_mlp import LayerNormMLP
from hqsweep.nn.linear import Linear
from hqsweep.nn.linear_loss import linear_cross_entropy
from hqsweep.nn.module import QuantizedModule, set_recipe
from hqsweep.nn.moe import LayerNormMoE, MoELayer
from hqsweep.nn.multihead_attention import MultiheadAttention
from hqsweep.nn.options import (
    AttentionOptions,
    GroupedLinearOptions,
    LayerNormLinearOptions,
    LinearOptions,
    MLPOptions,
    MoELayerOptions,
    MoEOptions,
    TransformerOptions,
)
from hqsweep.nn.parameter import quantized_model_init
from hqsweep.nn.probe import Probe
from hqsweep.nn.transformer_layer import TransformerLayer

__all__ = [
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
    "set_recipe",
]
