"""Modules whose matrix products run on quantized operands."""

from hqsweep.nn.context import autocast, quantization
from hqsweep.nn.linear import Linear
from hqsweep.nn.module import QuantizedModule, set_recipe
from hqsweep.nn.parameter import quantized_model_init
from hqsweep.nn.probe import Probe

__all__ = [
    "Linear",
    "Probe",
    "QuantizedModule",
    "autocast",
    "quantization",
    "quantized_model_init",
    "set_recipe",
]
