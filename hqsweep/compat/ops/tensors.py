"""Operations without parameters: shapes, scales, dropout, rounding, and branches."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.compat.arguments import flag
from hqsweep.compat.modules.activation_dtype import quantizer_in
from hqsweep.compat.ops.op import BasicOperation
from hqsweep.nn.core.context import autocast_recipe, current
from hqsweep.nn.core.delayed import DelayedStates
from hqsweep.nn.core.parameter import rounded
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import QuantizerRole


class Identity(BasicOperation):
    """x."""

    def run(self, x: Tensor) -> Tensor:
        return x


class Reshape(BasicOperation):
    """x in another shape."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def run(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape)


class ConstantScale(BasicOperation):
    """x times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def run(self, x: Tensor) -> Tensor:
        return x * self.scale


class Dropout(BasicOperation):
    """Dropout with probability p, from torch's generator, in training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout_probability = p

    def run(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_probability, self.training)


class Quantize(BasicOperation):
    """x rounded to the values of a linear's input, and its gradient to those of grad_output, under autocast's recipe.

    The results are tensors in x's dtype. A linear that reads them, in the same format, quantizes them again to the same
    values where requantization is safe. Outside of autocast it does nothing. Stochastic rounding draws its bits from
    the slot `name`, which may be assigned.
    """

    name = "quantize"

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.rounds_forward = flag("Quantize", "forward", forward)
        self.rounds_backward = flag("Quantize", "backward", backward)
        self.states = DelayedStates()

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        tensor = "input" if mode == "forward" else "grad_output"
        return [QuantizerRole("linear", tensor, self.name)]

    def run(self, x: Tensor) -> Tensor:
        recipe = autocast_recipe()
        if recipe is None:
            return x
        forward, backward = (self._rounding(recipe, mode, x) for mode in ("forward", "backward"))
        return _Rounded.apply(x, forward if self.rounds_forward else None, backward if self.rounds_backward else None)

    def _rounding(self, recipe: AnyRecipe, mode: str, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The function that rounds x, or its gradient."""
        (role,), context = self.get_quantizer_roles(mode), current()
        quantizer = quantizer_in(recipe.quantizer(role), x.dtype)
        step = context.turn if context.step is None else context.step
        call = {"step": step, "record": torch.is_grad_enabled(), "group": context.amax_group}
        states = self.states.of(role.tensor_type, quantizer, device=x.device, **call)
        return partial(rounded, quantizer=quantizer, key=context.key(str(role)), states=states)


class _Rounded(torch.autograd.Function):
    """x, and its gradient, by a function each, unless that is None."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.round = backward
        return x.view_as(x) if forward is None else forward(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy if ctx.round is None else ctx.round(dy), None, None


class MakeExtraOutput(BasicOperation):
    """x, which is also an extra output. in_place has no effect."""

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        flag("MakeExtraOutput", "in_place", in_place)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class AddExtraInput(BasicOperation):
    """x plus an extra input. in_place has no effect: no input is written."""

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        flag("AddExtraInput", "in_place", in_place)

    def run(self, x: Tensor, other: Tensor) -> Tensor:
        return other + x
