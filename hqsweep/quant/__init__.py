"""Quantized operands, hybrid quantizers, roles and recipes."""

from hqsweep.quant.hybrid import HybridQuantizer, IdentityQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, flatten, unflatten
from hqsweep.quant.recipe import Recipe
from hqsweep.quant.roles import QuantizerRole

__all__ = [
    "HybridOperand",
    "HybridQuantizer",
    "IdentityQuantizer",
    "Operand",
    "QuantizerRole",
    "Recipe",
    "flatten",
    "unflatten",
]
