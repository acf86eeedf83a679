"""Quantized operands, hybrid quantizers, roles and recipes."""

from hqsweep.quant import tensor_ops  # noqa: F401 (registers its handlers)
from hqsweep.quant.custom import CustomRecipe
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer, IdentityQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, flatten, unflatten
from hqsweep.quant.recipe import Recipe
from hqsweep.quant.roles import QuantizerRole
from hqsweep.quant.schedule import parse_recipe
from hqsweep.quant.sections import DpaQuantizers, LinearQuantizers
from hqsweep.quant.tensor import HybridQuantizedTensor

__all__ = [
    "CustomRecipe",
    "DpaQuantizers",
    "GroupedTensor",
    "HybridOperand",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LinearQuantizers",
    "Operand",
    "QuantizerRole",
    "Recipe",
    "flatten",
    "parse_recipe",
    "unflatten",
]
