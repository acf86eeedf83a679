"""Operands of a layer's weights that are made while ranks wait for each other, before they are asked for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup

from hqsweep.nn.core.parameter import AnyOperand, Weights, is_gathered, is_held
from hqsweep.nn.linear.linear_call import LinearCall
from hqsweep.parallel.wire import p2p_copy
from hqsweep.quant.hybrid import Direction, HybridQuantizer

Maker = Callable[[], None]


@dataclass(eq=False)
class Prefetched:
    """The operands of the weight of one call that are made, and not yet taken."""

    operands: dict[Direction, AnyOperand] = field(default_factory=dict)

    @torch.no_grad()
    def make(self, call: LinearCall, weights: Weights, direction: Direction) -> None:
        """Make call.weight() before it is asked for, unless it is made of more than the weights, or is there."""
        if direction in self.operands:
            return
        quantizer = call.quantizers.weight
        plain = type(quantizer) is HybridQuantizer and not quantizer.delayed and not call.context.probe
        if not plain or call.workspace is not None or is_held(weights) or is_gathered(weights):
            return
        if weights[0].untyped_storage().nbytes():  # which fully_shard may have freed, and not yet gathered again
            self.operands[direction] = call.weight(weights, direction)

    def take(self, direction: Direction) -> AnyOperand | None:
        """The operand of a direction, once; None where it is not made."""
        return self.operands.pop(direction) if direction in self.operands else None


@dataclass(eq=False)
class LayerWeights:
    """The weights of one call of a layer."""

    makers: Mapping[nn.Module, Callable[[], AnyOperand | None]]
    """Linears whose operands for forward are still to be made -> what makes one; None where it is not to be made."""
    made: dict[nn.Module, AnyOperand] = field(default_factory=dict, init=False)
    """The operands that are made, and not yet taken."""
    backward: list[Maker] = field(default_factory=list, init=False)
    """Each makes an operand for backward, if it is not made; in the order of backward."""

    def owe(self, group: ProcessGroup, device: torch.device) -> None:
        """Have the operands for forward made before the current stream next waits for ranks of the group."""
        if self.makers:
            p2p_copy.owe(group, device, self.make)

    def make(self) -> None:
        """Make the operands for forward."""
        makers, self.makers = self.makers, {}
        for linear, maker in makers.items():
            operand = maker()
            if operand is not None:
                self.made[linear] = operand

    def take(self, linear: nn.Module) -> Prefetched:
        """The operand that was made for forward of the linear, once."""
        operand = self.made.pop(linear, None)
        return Prefetched({} if operand is None else {"rowwise": operand})

    def made_in_backward(self, *makers: Maker) -> list[Maker]:
        """What makes the operands for backward of the layer, up to the linear that forward calls now, whose own makers
        come first."""
        self.backward = [*makers, *self.backward]
        return self.backward

    @contextmanager
    def lent(self, *linears: nn.Module) -> Iterator[None]:
        """A context for the call of the layer, in which what ranks share of its linears refers to these weights."""
        for linear in linears:
            linear.parallel.layer = self
        try:
            yield
        finally:
            for linear in linears:
                linear.parallel.layer = None
