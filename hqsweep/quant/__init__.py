"""Quantized operands, hybrid quantizers, roles and recipes."""

from hqsweep.quant import tensor_ops  # noqa: F401 (registers its handlers)
from hqsweep.quant.hybrid import HybridQuantizer, IdentityQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, flatten, unflatten
from hqsweep.quant.recipe import Recipe
from hqsweep.quant.roles import QuantizerRole
from hqsweep.quant.tensor import HybridQuantizedTensor

__all__ = [
    "HybridOperand",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "Operand",
    "QuantizerRole",
    "Recipe",
    "flatten",
    "unflatten",
]
