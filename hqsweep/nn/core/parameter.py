"""Parameters of modules: weights of GEMMs, which become operands, and tensors that are only rounded.

Weights are high-precision values that are quantized at every use, or, under quantized_model_init, operands. Linears
give their weights as a list: one [N, K], one [N, K] for each expert, or one [E, N, K] for all. They are read through
held_operands, weight_matrix and flatten_weights. WeightWorkspace keeps operands of a weight for later calls, until the
weight is written.

Tensors that are not GEMM operands are rounded: embedding tables, norm gains, boundaries between modules.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand, Identity, RngKey
from hqsweep.nn.core.delayed import DelayedStates, ExpertStates
from hqsweep.nn.core.wire import Part
from hqsweep.ops.layout import PackedExact
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.quant.delayed import SlotStates
from hqsweep.quant.gathered_weight import GatheredWeight
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Members, Operand, Skeleton, flatten, unflatten
from hqsweep.quant.tensor_protocol import TensorProtocol
from hqsweep.torch_private import foreach_copy_


class _StraightThrough(torch.autograd.Function):
    """Forward: dequantize(quantize(x)). Backward: the gradient unchanged (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx, x: Tensor, quantize: Callable[[Tensor], Operand]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        operand = quantize(rows)
        if operand.layout is None:
            return operand.dequantize().view(x.shape)
        parts = [member.dequantize() for member in operand.members]
        left_over = rows[sum(map(len, parts)) :]  # padding after the last expert
        return torch.cat([*parts, left_over]).view(x.shape)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def rounded(
    x: Tensor, quantizer: HybridQuantizer, key: RngKey, states: SlotStates | None = None, part: Part | None = None
) -> Tensor:
    """Return x [..., n] rounded to the quantizer's rowwise format, in x's dtype; x itself for fp32.

    part: how ranks share x.
    """

    def quantize(rows: Tensor) -> Operand:
        if part is not None:
            return part.quantize(quantizer, rows, rowwise="codes", key=key, states=states).rowwise
        return quantizer.quantize(rows, columnwise=None, key=key, states=states).rowwise

    return rounded_by(x, quantizer, quantize)


def rounded_by(x: Tensor, quantizer: HybridQuantizer, quantize: Callable[[Tensor], Operand]) -> Tensor:
    """Return rounded() with a given function that returns the rowwise operand of x, as a matrix or per expert."""
    if quantizer.rowwise.rht:
        raise UserError(f"{quantizer}: values are rounded without a transform; drop +rht of the rowwise format")
    return x if quantizer.rowwise == Identity(name="fp32") else _StraightThrough.apply(x, quantize)


AnyOperand = Operand | ExactOperand | PackedExact | Members
Weights = Sequence[Tensor]
"""One tensor for each matrix [N, K], or one for all experts [E, N, K]."""


def is_held(weights: Weights) -> bool:
    """Return whether the weights of a linear are quantized operands."""
    return isinstance(weights[0], TensorProtocol)


def expert_weights(weights: Weights) -> list[Tensor]:
    """Return each matrix [N, K], as views."""
    if weights[0].dim() != 3:
        return list(weights)
    if is_held(weights):  # of which ranks gather what one pass reads; views are of both directions
        for direction in weights[0].metadata.directions:
            weights[0].ready(direction)
    return list(weights[0].unbind(0))


def weight_matrix(weights: Weights, dtype: torch.dtype) -> Tensor:
    """Return all weights, one below the other, in dtype. Views whose rows are apart in memory are copied."""
    weights = [_values(weight) for weight in weights]
    if len(weights) == 1:
        weight = weights[0]
        if weight.dim() == 2:
            return in_dtype(weight, dtype)
        if weight.dtype is not dtype:
            weight = weight.to(dtype, memory_format=torch.contiguous_format)
        return weight.flatten(0, 1)
    (rows, width), first = weights[0].shape, weights[0]
    joined = torch.empty(len(weights) * rows, width, dtype=dtype, device=first.device)
    foreach_copy_(joined.split(rows), list(weights))
    return joined


def _values(weight: Tensor) -> Tensor:
    """Return a weight, or the values that ranks have gathered, in their dtype."""
    if not isinstance(weight, GatheredWeight):
        return weight
    return weight.value if torch.compiler.is_compiling() else weight.filled()


def is_gathered(weights: Weights) -> bool:
    """Return whether the weights of a linear are plain tensors that ranks have gathered in its dtype."""
    return isinstance(weights[0], GatheredWeight)


def are_filled_again(weights: Weights) -> bool:
    """Return whether weights lie in memory that ranks free after forward and fill for backward. A trace cannot tell."""
    if torch.compiler.is_compiling():
        return False
    return is_gathered(weights) or (is_held(weights) and weights[0].planes is not None)


def held_operands(weights: Weights, direction: Direction) -> Operand | Members:
    """Return the operands of one direction of held quantized weights, which have passed check_held."""
    return _joined([getattr(weight.ready(direction), direction) for weight in weights])


def _joined(operands: list[Operand]) -> Operand | Members:
    return operands[0] if len(operands) == 1 else Members(members=operands)


def link_states(weights: Weights, states: DelayedStates | ExpertStates) -> list[SlotStates]:
    """Link held quantized weights to the states of their module, after a copy, a move or a checkpoint.

    Returns these states.
    """
    one_for_each = isinstance(states, ExpertStates) and weights[0].dim() == 2
    linked = []
    for weight, own in zip(weights, states if one_for_each else [states], strict=True):
        if isinstance(weight, TensorProtocol):
            weight.states = weight.own_states(own).of("weight", weight.quantizer, device=weight.device)
            if weight.planes is not None:
                weight.planes.link(weight.states)
            linked.append(weight.states)
    return [own for states in linked if states for own in (states if isinstance(states, list) else [states])]


def check_held(weight: TensorProtocol, direction: Direction, quantizer: HybridQuantizer) -> None:
    """Raise UserError unless a recipe's GEMM can read the quantized weight in this direction."""
    held = weight.quantizer
    if held != quantizer and str(held) != str(quantizer):  # a file has the text alone
        raise UserError(
            f"the weight is held in {held}, but the recipe asks for {quantizer}; build the model anew, or"
            " give the recipe it was built with"
        )
    if getattr(held, direction).rht_drawn:
        raise UserError(
            f"the weight is held in {held}, and its {direction} operand has the signs of the step that wrote it, while"
            " +eden draws new ones in every step; do not hold the weight, or give all operands +sr in place of +eden"
        )
    if getattr(weight, direction) is None:
        raise UserError(f"the {direction} operand of the weight is not held; quantize it with directions={DIRECTIONS}")
    weight.check_complete()


def flatten_weights(weights: Weights) -> tuple[list[Tensor], list[Skeleton]]:
    """Return the tensors of the columnwise operands of held weights, which dgrad needs."""
    flat = [flatten(weight.columnwise) for weight in weights]
    return [tensor for tensors, _ in flat for tensor in tensors], [skeleton for _, skeleton in flat]


def unflatten_weights(tensors: Sequence[Tensor], skeletons: Sequence[Skeleton]) -> Operand | Members:
    """Return the columnwise operands of held weights, from the tensors of flatten_weights."""
    count = len(tensors) // len(skeletons)
    parts = [tensors[i * count : (i + 1) * count] for i in range(len(skeletons))]
    return _joined([unflatten(part, skeleton) for part, skeleton in zip(parts, skeletons, strict=True)])


SUMS: list[Callable[[Tensor], Tensor | None]] = []
"""Functions that find the sum of a weight's gradients without a main_grad; they return None for unknown weights.

nn knows nothing of fully_shard. So optim.use_main_grads adds the function that finds FSDP's sum, once a process."""


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the tensor to which dw is added: weight.main_grad, or the FP32 sum that FSDP reduces next."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        return main_grad
    return next((total for total in (sum_of(weight) for sum_of in SUMS) if total is not None), None)


def summed_main_grad(weight: Tensor) -> Tensor:
    """Return main_grad_of(), to which this backward adds dw.

    As in TransformerEngine, a true overwrite_main_grad of the parameter zeroes it first. grad_added_to_main_grad, if
    the parameter has it, becomes true.
    """
    main_grad, parameter = main_grad_of(weight), getattr(weight, "spread", weight)
    if getattr(parameter, "overwrite_main_grad", False):
        main_grad.zero_()
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True
    return main_grad


def check_main_grad(weight: Tensor) -> None:
    """Raise UserError unless the weight has an FP32 main_grad to accumulate into."""
    main_grad = main_grad_of(weight)
    if main_grad is None or main_grad.dtype != torch.float32 or main_grad.shape != weight.shape:
        got = "none" if main_grad is None else f"{main_grad.dtype} {tuple(main_grad.shape)}"
        raise UserError(
            f"fuse_wgrad_accumulation adds to weight.main_grad, a float32 tensor {tuple(weight.shape)}; got {got}"
            " (optim.use_main_grads gives every parameter one)"
        )


_UPDATES = [0]


def note_update() -> None:
    """Count an update of DTensors. FSDP gathers weights anew after it into tensors that keep their version counters."""
    _UPDATES[0] += 1


class WeightWorkspace:
    """Keeps one operand for each direction of a weight, or of a group of weights.

    An operand takes 2 bytes an element where it is exact in bfloat16. quantization(cache_weights=True) uses it. An
    operand is made again when one of these changes: the weight's memory, its version counter, the quantizer, the form,
    the step, and with +sr the key of the random bits. It is also made again after a step of FusedAdam on DTensors, such
    as the parameters of fully_shard.

    Torch's version counter misses writes through weight.data, a NumPy view, a storage, and torch's fused optimizers. So
    a copy of the weights is kept, and each use of an operand compares the weights with it, bit for bit. On CUDA the
    host waits for this. Inside nn.context.unwritten() the caller promises no such writes, so nothing is copied or
    compared.
    """

    def __init__(self) -> None:
        self._cached: dict[Direction, tuple[Hashable, Any]] = {}
        self._copies: Sequence[Tensor] = ()

    def take(
        self,
        weights: Sequence[Tensor],
        forms: Mapping[Direction, Hashable],
        quantizer: HybridQuantizer,
        key: RngKey,
        make: Callable[[Collection[Direction]], HybridOperand],
        together: bool = False,
        period: object = None,
    ) -> Any:
        """Return the operand of the first direction in `forms`: the kept one, if bits and form are the same, else
        make's.

        If it is made, missing operands of the other directions in `forms` are made from the same read of the weights.
        together: ranks make it at the same time, and so must agree whether to make it. The address of the weights,
        which fully_shard changes, is then ignored. Without a period it is then always made, since writes may differ
        between ranks. period: see nn.context.unwritten.
        """
        wanted = next(iter(forms))
        if not _can_keep(weights, quantizer, period, together):
            return getattr(make([wanted]), wanted)
        step = None if torch.compiler.is_compiling() else key.step  # one trace serves all steps
        written = tuple((None if together else w.data_ptr(), w._version) for w in weights)
        bits = (written, _UPDATES[0], quantizer, key if quantizer.stochastic else step, period)
        if self._cached and period is None and not self._are_copies(weights):
            self.clear()
        if not self._has(wanted, (bits, forms[wanted])):
            missing = {d: (bits, form) for d, form in forms.items() if not self._has(d, (bits, form))}
            for direction in missing:
                self._cached.pop(direction, None)  # its memory is free before the new one is made
            if period is None and not self._cached:
                self._copies = ()
                self._copies = [weight.detach().clone() for weight in weights]
            operands = make(list(missing))
            self._cached |= {d: (identity, getattr(operands, d)) for d, identity in missing.items()}
        return self._cached[wanted][1]

    def _are_copies(self, weights: Sequence[Tensor]) -> bool:
        """Return whether the copies have the bits of the weights."""
        pairs = zip(weights, self._copies, strict=False)
        return len(self._copies) == len(weights) and all(_equal_bits(weight, copy) for weight, copy in pairs)

    def _has(self, direction: Direction, identity: Hashable) -> bool:
        entry = self._cached.get(direction)
        return entry is not None and entry[0] == identity

    def __len__(self) -> int:
        """Return the number of kept operands."""
        return len(self._cached)

    def clear(self) -> None:
        self._cached.clear()
        self._copies = ()

    def __getstate__(self) -> dict[str, Any]:
        return {"_cached": {}, "_copies": ()}


def _can_keep(weights: Sequence[Tensor], quantizer: HybridQuantizer, period: object, together: bool) -> bool:
    """Return whether operands depend on the weights alone, and a later call can detect a write to the weights."""
    if quantizer.delayed or any(weight.is_inference() for weight in weights):
        return False  # weights are not all they depend on, or have no version counter
    if period is not None:
        return True
    captured = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
    return not (together or captured or weights[0].is_meta)


def _equal_bits(weight: Tensor, copy: Tensor) -> bool:
    if weight.shape != copy.shape or weight.dtype is not copy.dtype or weight.device != copy.device:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return torch.equal(weight.detach().view(bits), copy.view(bits))  # as numbers, NaN differs from itself
