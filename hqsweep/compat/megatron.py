"""Megatron-Core's distributed optimizer for weights that are held quantized.

Megatron's DistributedDataParallel lays weights and gradients in flat buffers, and each data-parallel rank updates a
fragment of these in FP32. It has a way for TransformerEngine's FP8 weights. After adapt_megatron() it takes this
package's weights the same way, in every format and both directions: fragments go through quantize_master_weights.
Megatron's buffer has a byte for each element. It holds the rowwise codes where these are bytes from which the other
operand follows.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.parallel.shards.masters import quantize_master_weights, takes_rows
from hqsweep.parallel.shards.raw_data import post_all_gather_processing, raw_data_sizes, replace_raw_data
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

    Call it once in each process before the model is wrapped. Masters start from the preserved values. An optimizer step
    ends with a gather of parameters; then every rank has the whole weight, quantized from the masters of all ranks,
    with the bytes of one process.

    Two cases differ in what travels. Some weights have codes of a byte from which the columnwise operand follows:
    fp8_current, tiles of fp8_block+2d and mxfp8+2d, @rowwise_dequantized with rows in 8 or 6 bits. Megatron's own
    gather sends their codes, one byte an element; quantize_master_weights sends the scales and the rows that fragments
    cut. In other formats the second operand is made from original values ("mxfp8", "nvfp4", fp8_delayed), or a rank's
    part of the buffer is not the part that it updates (4-bit codes). Then quantize_master_weights sends the values in
    the source dtype. Megatron's buffer of one byte an element is still there, and gathered, but it is not read.

    UserError where Megatron-Core is missing. UserError when a model is wrapped with reuse_grad_buf_for_mxfp8_param_ag,
    which would write the bytes of that buffer into weights as values.
    """
    try:
        modules = [import_module(name) for name in MODULES]
    except ImportError as error:
        raise UserError(f"adapt_megatron: {error}; install megatron-core") from None
    _refuse_values(import_module(MODULES[2])._ParamAndGradBuffer)
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


def _is_gathered(tensor: Any) -> bool:
    """Whether Megatron's gather brings the codes of a held weight."""
    return _is_held(tensor) and tensor.shared.moved == "codes"


def _move_storage(plain: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """A function that also moves the codes of held weights. It does so where a rank's part of the buffer, one byte an
    element, holds the codes that the rank updates, and everything else follows from them."""

    def move(tensor: Tensor, buffer: Tensor) -> None:
        if not _is_held(tensor):
            plain(tensor, buffer)
        elif takes_rows(tensor) and raw_data_sizes(tensor).codes == buffer.numel():
            replace_raw_data(tensor, buffer)

    return move


def _process(plain: Callable[[Sequence[Tensor]], None]) -> Callable[[Sequence[Tensor]], None]:
    """A function that also processes held weights whose codes were gathered; every rank has all of the others."""

    def process(params: Sequence[Tensor]) -> None:
        post_all_gather_processing([p for p in params if _is_gathered(p)])
        others = [p for p in params if not _is_held(p)]
        if others:
            plain(others)

    return process


def _quantize_fragments(plain: Callable[..., None]) -> Callable[..., None]:
    def quantize(params: Sequence[Tensor], masters: Sequence, offsets: Sequence, group: Any, *rest: Any) -> None:
        every = list(zip(params, masters, offsets, strict=True))
        for gathered in (True, False):
            held = [each for each in every if _is_held(each[0]) and _is_gathered(each[0]) is gathered]
            if held:
                quantize_master_weights(*zip(*held, strict=True), group, manual_post_all_gather_processing=gathered)
        others = [each for each in every if not _is_held(each[0])]
        if others:
            plain(*map(list, zip(*others, strict=True)), group, *rest)

    return quantize


def _refuse_values(buffer: type) -> None:
    """Have Megatron's buffer of parameters refuse held weights whose values it would gather in place of gradients."""
    plain = buffer.__init__
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def init(
        self: Any, ddp_config: Any, param_dtype: Any, grad_dtype: Any, params: Any, *args: Any, **named: Any
    ) -> None:
        held = [p for p in params if _is_held(p)]
        if held and ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            raise UserError(
                "adapt_megatron: reuse_grad_buf_for_mxfp8_param_ag is for TransformerEngine's MXFP8 weights; leave it"
                f" out for weights that are held in {held[0].quantizer}"
            )
        plain(self, ddp_config, param_dtype, grad_dtype, params, *args, **named)

    buffer.__init__ = init


WRAPPED: dict[str, Callable[..., Callable[..., Any]]] = {
    "is_float8tensor": _is_quantized,
    "dequantize_fp8_tensor": _dequantize,
    "modify_underlying_storage": _move_storage,
    "post_all_gather_processing": _process,
    "quantize_param_shard": _quantize_fragments,
}
"""A function of megatron.core.fp8_utils -> the wrapper that makes it handle held weights."""
