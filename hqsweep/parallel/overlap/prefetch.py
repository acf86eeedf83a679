"""Operands of a layer's weights, made before their use, while ranks wait for each other."""

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
    """The operands of one call's weight that are made and not yet taken."""

    operands: dict[Direction, AnyOperand] = field(default_factory=dict)

    @torch.no_grad()
    def make(self, call: LinearCall, weights: Weights, direction: Direction) -> None:
        """Make call.weight() early, unless it needs more than the weights, or exists."""
        if direction in self.operands:
            return
        quantizer = call.quantizers.weight
        plain = type(quantizer) is HybridQuantizer and not quantizer.delayed and not call.context.probe
        if not plain or call.workspace is not None or is_held(weights) or is_gathered(weights):
            return
        if weights[0].untyped_storage().nbytes():  # which fully_shard may have freed, and not yet gathered again
            self.operands[direction] = call.weight(weights, direction)

    def take(self, direction: Direction) -> AnyOperand | None:
        """Return the operand of a direction, once; None if it is not made."""
        return self.operands.pop(direction) if direction in self.operands else None


@dataclass(eq=False)
class LayerWeights:
    """The weights of one call of a layer."""

    makers: Mapping[nn.Module, Callable[[], AnyOperand | None]]
    """Linear -> the function that makes its operand for forward; None for a linear without such an operand."""
    made: dict[nn.Module, AnyOperand] = field(default_factory=dict, init=False)
    """The operands that are made and not yet taken."""
    backward: list[Maker] = field(default_factory=list, init=False)
    """Functions that make an operand for backward, unless it is made; in the order of backward."""

    def owe(self, group: ProcessGroup, device: torch.device) -> None:
        """Defer the operands for forward until the current stream would wait for ranks of the group."""
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
        """Return the prefetched operand of the linear for forward, once."""
        operand = self.made.pop(linear, None)
        return Prefetched({} if operand is None else {"rowwise": operand})

    def made_in_backward(self, *makers: Maker) -> list[Maker]:
        """Return the makers of the layer's operands for backward, up to the linear that forward calls now.

        The linear's own makers come first.
        """
        self.backward = [*makers, *self.backward]
        return self.backward

    @contextmanager
    def lent(self, *linears: nn.Module) -> Iterator[None]:
        """A context for the call of the layer, in which the shared linears use these weights."""
        for linear in linears:
            linear.parallel.layer = self
        try:
            yield
        finally:
            for linear in linears:
                linear.parallel.layer = None
