"""Weights of GEMMs: high-precision values that are quantized at every use, or, under quantized_model_init, operands.

Modules reach their weight through held_operand and flatten_weight, which take either kind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.nn.context import current
from hqsweep.nn.delayed import DelayedStates, slots_of
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.operand import Operand, Skeleton, flatten, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import QuantizerRole


@dataclass(frozen=True)
class _Init:
    preserve: bool


_INIT: ContextVar[_Init | None] = ContextVar("hqsweep_quantized_model_init", default=None)


@contextmanager
def quantized_model_init(*, enabled: bool = True, preserve_high_precision_init_val: bool = False) -> Iterator[None]:
    """Modules built inside hold their GEMM weights as HybridQuantizedTensor, in both directions of their recipe.

    Biases, gains and embeddings stay as they are. It works under no_grad and on the meta device, where Module.to_empty
    and reset_parameters follow. preserve_high_precision_init_val: keep the initial values on the CPU, as what an
    optimizer starts its masters from. Random bits of +sr are keyed by the surrounding quantization().
    """
    token = _INIT.set(_Init(preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _INIT.reset(token)


def gemm_weight(
    weight: Tensor,
    quantizer: HybridQuantizer,
    role: QuantizerRole,
    dtype: torch.dtype,
    states: DelayedStates | Sequence[DelayedStates],
) -> nn.Parameter:
    """The parameter of a module: `weight` itself, or inside quantized_model_init its quantized form.

    dtype: that of the module's tensors, to which weights are rounded before they are quantized. states: the module's,
    or, of weights [E, N, K] of experts in one parameter, those of each.
    """
    init = _INIT.get()
    if init is None:
        return nn.Parameter(weight)
    options = {"source_dtype": dtype, "key": current().key(str(role))}
    options["states"] = _weight_states(states, quantizer, weight.device)
    options["preserve_high_precision_init_val"] = init.preserve
    kind = HybridQuantizedTensor if isinstance(states, DelayedStates) else GroupedTensor
    return nn.Parameter(kind.quantize(weight.detach(), quantizer, **options))


def _weight_states(
    states: DelayedStates | Sequence[DelayedStates], quantizer: HybridQuantizer, device: torch.device
) -> SlotStates | list[SlotStates | None] | None:
    if isinstance(states, DelayedStates):
        return states.of("weight", quantizer, device=device)
    if not quantizer.delayed:
        return [None] * len(states)
    return slots_of(states, "weight", quantizer, device=device, step=None, record=False)


def held_operand(weight: Tensor | Operand, direction: Direction, quantizer: HybridQuantizer) -> Operand | None:
    """The operand of one direction of a weight that is held quantized; None for one in high precision.

    UserError, for the caller to say where, when it is of another quantizer, or is not there.
    """
    if isinstance(weight, HybridQuantizedTensor):
        check_held(weight, direction, quantizer)
        return getattr(weight, direction)
    return weight if isinstance(weight, Operand) else None


def link_states(weight: Tensor, states: DelayedStates | Sequence[DelayedStates]) -> None:
    """Have a weight that is held quantized use the states of its module, after a copy, a move or a checkpoint."""
    if isinstance(weight, HybridQuantizedTensor):
        weight.states = _weight_states(states, weight.quantizer, weight.device)


def check_held(weight: HybridQuantizedTensor, direction: Direction, quantizer: HybridQuantizer) -> None:
    """UserError unless the quantized weight is what a recipe's GEMM reads in this direction."""
    if weight.quantizer != quantizer:
        raise UserError(
            f"the weight is held in {weight.quantizer}, but the recipe asks for {quantizer}; build the model anew, or"
            " give the recipe it was built with"
        )
    if getattr(weight, direction) is None:
        raise UserError(f"the {direction} operand of the weight is not held; quantize it with directions={DIRECTIONS}")


def flatten_weight(weight: Tensor) -> tuple[list[Tensor], Skeleton | None]:
    """What dgrad needs of a weight: the weight itself, or the tensors of its columnwise operand."""
    if isinstance(weight, HybridQuantizedTensor):
        return flatten(weight.columnwise)
    return [weight], None


def unflatten_weight(tensors: Sequence[Tensor], skeleton: Skeleton | None) -> Tensor | Operand:
    """Inverse of flatten_weight."""
    return tensors[0] if skeleton is None else unflatten(tensors, skeleton)


def check_main_grad(weight: Tensor) -> None:
    """UserError unless the weight has an FP32 main_grad to accumulate into."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype != torch.float32 or main_grad.shape != weight.shape:
        got = "none" if main_grad is None else f"{main_grad.dtype} {tuple(main_grad.shape)}"
        raise UserError(
            f"fuse_wgrad_accumulation adds to weight.main_grad, a float32 tensor {tuple(weight.shape)}; got {got}"
            " (optim.use_main_grads gives every parameter one)"
        )
