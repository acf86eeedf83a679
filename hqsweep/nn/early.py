"""Operands of a layer's weights that are made while ranks wait for each other, before they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from hqsweep.dist import peers
from hqsweep.nn.parameter import AnyOperand
from hqsweep.nn.scoped import Entered, Scoped
from hqsweep.quant.hybrid import Direction


class MakesOperand(Protocol):
    def early_operand(self, shape: Sequence[int]) -> list[AnyOperand]:
        """The operand of the weight for forward of an input [*shape, K]; none where it is not to be made beforehand."""


@dataclass(eq=False)
class EarlyWeights:
    """Linears of a layer that are called next, each with the leading axes of its input."""

    linears: Sequence[tuple[MakesOperand, Sequence[int]]]
    made: dict[MakesOperand, AnyOperand] = field(default_factory=dict, init=False)
    """The operands that are made, and not yet taken."""

    def make(self) -> None:
        """Make those that are not made."""
        linears, self.linears = self.linears, ()
        for linear, shape in linears:
            for operand in linear.early_operand(shape):
                self.made[linear] = operand


_WEIGHTS: Scoped[EarlyWeights | None] = Scoped(None)


def early_weights(linears: Sequence[tuple[MakesOperand, Sequence[int]]]) -> Entered[EarlyWeights | None]:
    """A context for the call of a layer: inside, the first wait that owe_weights() announces makes the operands."""
    return _WEIGHTS.entered(EarlyWeights(linears))


def owe_weights(group: ProcessGroup, device: torch.device) -> None:
    """Have the operands of the layer made before the current stream next waits for ranks of the group."""
    weights = _WEIGHTS.get()
    if weights is not None and weights.linears:
        peers.owe(group, device, weights.make)


def early_operand(linear: MakesOperand) -> dict[Direction, AnyOperand]:
    """The operand that was made for a call of the linear, once."""
    weights = _WEIGHTS.get()
    operand = None if weights is None else weights.made.pop(linear, None)
    return {} if operand is None else {"rowwise": operand}
