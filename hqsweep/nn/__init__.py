"""Modules whose matrix products run on quantized operands."""

from hqsweep.nn.context import quantization
from hqsweep.nn.linear import Linear
from hqsweep.nn.parameter import quantized_model_init
from hqsweep.nn.probe import Probe

__all__ = ["Linear", "Probe", "quantization", "quantized_model_init"]
