"""Modules whose matrix products run on quantized operands."""

from hqsweep.nn.attention.attention import DotProductAttention
from hqsweep.nn.attention.multihead_attention import MultiheadAttention
from hqsweep.nn.core.context import autocast, quantization, recomputed
from hqsweep.nn.core.model_init import quantized_model_init
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
)
from hqsweep.nn.core.probe import Probe
from hqsweep.nn.experts.grouped_linear import GroupedLinear
from hqsweep.nn.experts.moe import LayerNormMoE, MoELayer
from hqsweep.nn.layers.saved_memory import ActivationOffload
from hqsweep.nn.layers.transformer_layer import TransformerLayer
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear
from hqsweep.nn.linear.linear import Linear
from hqsweep.nn.linear.linear_loss import linear_cross_entropy
from hqsweep.nn.linear.mlp import LayerNormMLP

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
