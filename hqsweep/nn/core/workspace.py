"""WeightWorkspace: keeps operands of a weight for later calls, until the weight is written."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hqsweep.formats import RngKey
from hqsweep.quant.hybrid import Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand

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
