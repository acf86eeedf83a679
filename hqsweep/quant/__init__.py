"""Quantized operands and hybrid quantizers. Names of hqsweep.recipe can be imported from here, too."""

from typing import Any

from hqsweep.parallel.shards.masters import quantize_master_weights
from hqsweep.parallel.shards.raw_data import RawSizes, post_all_gather_processing, raw_data_sizes, replace_raw_data
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.shards.shard_agree import quantize_shards_
from hqsweep.quant import tensor_ops  # noqa: F401 (registers its handlers)
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer, IdentityQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, flatten, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor

RECIPE_NAMES = ("CustomRecipe", "DpaQuantizers", "LinearQuantizers", "QuantizerRole", "Recipe", "parse_recipe")

__all__ = [
    *RECIPE_NAMES,
    "GroupedTensor",
    "HybridOperand",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "Operand",
    "Place",
    "RawSizes",
    "flatten",
    "post_all_gather_processing",
    "quantize_master_weights",
    "quantize_shards_",
    "raw_data_sizes",
    "replace_raw_data",
    "unflatten",
]


def __getattr__(name: str) -> Any:
    """Import recipe names lazily, since hqsweep.recipe is built on this package."""
    if name not in RECIPE_NAMES:
        raise AttributeError(f"module 'hqsweep.quant' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("hqsweep.recipe"), name)
