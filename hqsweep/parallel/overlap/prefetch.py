"""Operands of a layer's weights that are made while ranks wait for each other, before they are asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from hqsweep.nn.core.scoped import Entered, Scoped
from hqsweep.parallel.wire import p2p_copy

AnyOperand = Any
"""An operand as a product takes it (nn.parameter.AnyOperand)."""


class MakesOperand(Protocol):
    def early_operand(self, shape: Sequence[int]) -> AnyOperand | None:
        """The operand of the weight for forward of an input [*shape, K]; None where it is not to be made beforehand."""


@dataclass(eq=False)
class EarlyWeights:
    """The weights of one call of a layer."""

    linears: Sequence[tuple[MakesOperand, Sequence[int]]]
    """Linears whose operands for forward are still to be made, each with the leading axes of its input."""
    made: dict[MakesOperand, AnyOperand] = field(default_factory=dict, init=False)
    """Those that are made, and not yet taken."""
    backward: list[Callable[[], None]] = field(default_factory=list, init=False)
    """Each makes an operand for backward, if it is not made; in the order of backward."""

    def make(self) -> None:
        """Make the operands for forward."""
        linears, self.linears = self.linears, ()
        for linear, shape in linears:
            operand = linear.early_operand(shape)
            if operand is not None:
                self.made[linear] = operand


_WEIGHTS: Scoped[EarlyWeights | None] = Scoped(None)


def early_weights(linears: Sequence[tuple[MakesOperand, Sequence[int]]]) -> Entered[EarlyWeights | None]:
    """A context for a call of a layer: inside, the first wait that owe_weights() announces makes the operands."""
    return _WEIGHTS.entered(EarlyWeights(linears))


def owe_weights(group: ProcessGroup, device: torch.device) -> None:
    """Have the operands for forward made before the current stream next waits for ranks of the group."""
    weights = _WEIGHTS.get()
    if weights is not None and weights.linears:
        p2p_copy.owe(group, device, weights.make)


def early_operand(linear: MakesOperand) -> dict[str, AnyOperand]:
    """The operand that was made for forward of the linear, once."""
    weights = _WEIGHTS.get()
    operand = None if weights is None else weights.made.pop(linear, None)
    return {} if operand is None else {"rowwise": operand}


def made_in_backward(*makers: Callable[[], None]) -> list[Callable[[], None]]:
    """What makes the operands for backward of the layer, up to the linear that forward calls now, whose own makers come
    first."""
    weights = _WEIGHTS.get()
    if weights is None:
        return list(makers)
    weights.backward = [*makers, *weights.backward]
    return weights.backward
