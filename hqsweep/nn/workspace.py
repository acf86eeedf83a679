"""WeightWorkspace: operands of a weight that later calls use again, while nobody has written to the weight."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hqsweep.dist.local import updates
from hqsweep.formats import RngKey
from hqsweep.quant.hybrid import Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand


class WeightWorkspace:
    """One operand a direction, of a weight or of a group: 2 bytes an element each where it is exact in bfloat16.

    Used inside quantization(cache_weights=True). An operand is made anew when a weight's memory, its version counter,
    the quantizer, its form, the step or, for +sr, the key of the random bits is another one, and after a step of
    FusedAdam on DTensors, as those of fully_shard. Writing by weight.data, or as torch's fused optimizers do, bypasses
    torch's version counter, and is seen when the step is another one.
    """

    def __init__(self) -> None:
        self._cached: dict[Direction, tuple[Hashable, Any]] = {}

    def take(
        self,
        weights: Sequence[Tensor],
        forms: Mapping[Direction, Hashable],
        quantizer: HybridQuantizer,
        key: RngKey,
        make: Callable[[Collection[Direction]], HybridOperand],
        together: bool = False,
    ) -> Any:
        """The operand of the first direction in forms, as make gave it when it was last called for the same bits in the
        same form.

        When it has to be made, so are the other directions in forms that are not there: those that will be asked for
        next, from the same read of the weights. together: ranks make it at the same time, and so have to agree whether
        it is to be made: where the weights lie in memory, which fully_shard changes, is left out then.
        """
        wanted = next(iter(forms))
        if quantizer.delayed or any(weight.is_inference() for weight in weights):
            return getattr(make([wanted]), wanted)  # weights are not all it depends on, or have no version counter
        step = None if torch.compiler.is_compiling() else key.step  # one trace serves all steps
        written = tuple((None if together else w.data_ptr(), w._version) for w in weights)
        bits = (written, updates(), quantizer, key if quantizer.stochastic else step)
        if not self._has(wanted, (bits, forms[wanted])):
            missing = {d: (bits, form) for d, form in forms.items() if not self._has(d, (bits, form))}
            for direction in missing:
                self._cached.pop(direction, None)  # its memory is free before the new one is made
            operands = make(list(missing))
            self._cached |= {d: (identity, getattr(operands, d)) for d, identity in missing.items()}
        return self._cached[wanted][1]

    def _has(self, direction: Direction, identity: Hashable) -> bool:
        entry = self._cached.get(direction)
        return entry is not None and entry[0] == identity

    def __len__(self) -> int:
        """How many operands are kept."""
        return len(self._cached)

    def clear(self) -> None:
        self._cached.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_cached": {}}
