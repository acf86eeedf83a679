"""Megatron-Core's distributed optimizer for weights that are held quantized.

Megatron's DistributedDataParallel lays weights and gradients in flat buffers, of which each data-parallel rank updates
a fragment in FP32. What it does with TransformerEngine's FP8 weights it does, after adapt_megatron(), with this
package's as well, in every format and both directions: their fragments go through quantize_master_weights.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.quant.masters import quantize_master_weights
from hqsweep.quant.tensor import HybridQuantizedTensor

MODULES = (
    "megatron.core.fp8_utils",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.distrib_optimizer",
)
"""The modules that call the functions by their names."""


def adapt_megatron() -> None:
    """Have DistributedDataParallel and DistributedOptimizer of Megatron-Core (0.16) take HybridQuantizedTensor
    parameters, as quantized_model_init(preserve_high_precision_init_val=True) makes them, beside all others.

    Call it once in each process before the model is wrapped. Masters start from the preserved values. After each
    optimizer step every rank has the whole weight, quantized from the masters of all ranks, to the byte what one
    process makes of them. Megatron's own buffer of one byte an element is still there, and gathered, but nothing reads
    it. UserError where Megatron-Core is missing.
    """
    try:
        modules = [import_module(name) for name in MODULES]
    except ImportError as error:
        raise UserError(f"adapt_megatron: {error}; install megatron-core") from None
    for name, wrapped in WRAPPED.items():
        plain = getattr(modules[0], name)
        if not hasattr(plain, "__wrapped__"):
            adapted = wraps(plain)(wrapped(plain))
            for module in modules:
                if hasattr(module, name):
                    setattr(module, name, adapted)


def _is_held(tensor: Any) -> bool:
    return isinstance(tensor, HybridQuantizedTensor)


def _is_quantized(plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda tensor: _is_held(tensor) or plain(tensor)


def _dequantize(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.dequantize() if _is_held(tensor) else plain(tensor)


def _leave_storage(plain: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """A function that moves the storage of plain tensors alone: operands stay where they are."""
    return lambda tensor, buffer: None if _is_held(tensor) else plain(tensor, buffer)


def _of_others(plain: Callable[[Sequence[Tensor]], None]) -> Callable[[Sequence[Tensor]], None]:
    """A function that processes plain parameters alone: every rank has whole held weights already."""

    def process(params: Sequence[Tensor]) -> None:
        others = [p for p in params if not _is_held(p)]
        if others:
            plain(others)

    return process


def _quantize_fragments(plain: Callable[..., None]) -> Callable[..., None]:
    def quantize(params: Sequence[Tensor], masters: Sequence, offsets: Sequence, group: Any, *rest: Any) -> None:
        every = list(zip(params, masters, offsets, strict=True))
        held, others = ([e for e in every if _is_held(e[0]) is ours] for ours in (True, False))
        if held:
            quantize_master_weights(*zip(*held, strict=True), group)
        if others:
            plain(*map(list, zip(*others, strict=True)), group, *rest)

    return quantize


WRAPPED: dict[str, Callable[..., Callable[..., Any]]] = {
    "is_float8tensor": _is_quantized,
    "dequantize_fp8_tensor": _dequantize,
    "modify_underlying_storage": _leave_storage,
    "post_all_gather_processing": _of_others,
    "quantize_param_shard": _quantize_fragments,
}
"""A function of megatron.core.fp8_utils -> the wrapper that makes it handle held weights."""
