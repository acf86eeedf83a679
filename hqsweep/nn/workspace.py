"""WeightWorkspace: operands of a weight that later calls use again, while nobody has written to the weight."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from hqsweep.formats import RngKey
from hqsweep.ops.request import Output
from hqsweep.quant import HybridQuantizer
from hqsweep.quant.hybrid import Direction


class WeightWorkspace:
    """One operand a direction, of a weight or of a group: 2 bytes an element each where it is exact in bfloat16.

    Used inside quantization(cache_weights=True). An operand is made anew when a weight's memory, its version counter,
    the quantizer, its output or, for +sr, the key of the random bits is another one. Writing through weight.data
    bypasses torch's version counter and so this check.
    """

    def __init__(self) -> None:
        self._made: dict[Direction, tuple[Hashable, Any]] = {}

    def take(
        self,
        weights: Sequence[Tensor],
        direction: Direction,
        quantizer: HybridQuantizer,
        output: Output,
        key: RngKey,
        make: Callable[[], Any],
    ) -> Any:
        """What make() gave when it was last called for the same bits in the same form."""
        if quantizer.delayed or any(weight.is_inference() for weight in weights):
            return make()  # weights are not all that it depends on, or they have no version counter
        memory = tuple((w.data_ptr(), w._version) for w in weights)
        identity = (memory, quantizer, output, key if quantizer.stochastic else None)
        found = self._made.get(direction)
        if found is None or found[0] != identity:
            self._made.pop(direction, None)  # its memory is free before the new one is made
            found = self._made[direction] = (identity, make())
        return found[1]

    def clear(self) -> None:
        self._made.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"_made": {}}
