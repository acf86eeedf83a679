"""The bases of fusible operations: what a Sequential runs, one after the other.

An operation of this package is a function of torch in run(). A user's own BasicOperation has op_forward() and
op_backward() with a context, as in TransformerEngine.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hqsweep.compat.arguments import shown
from hqsweep.errors import UserError
from hqsweep.nn.core.products import in_autocast


def dtype_of(x: Tensor, parameter: Tensor) -> torch.dtype:
    """The dtype of an operation with parameters: of these, or of torch.autocast."""
    return torch.get_autocast_dtype(x.device.type) if in_autocast(x.device) else parameter.dtype


class OperationContext:
    """What op_forward() keeps for op_backward()."""

    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which saved_tensors has in op_backward()."""
        self.to_save = tensors


class FusibleOperation(nn.Module):
    """The base of all operations."""

    @property
    def is_fused_op(self) -> bool:
        """Whether it stands for several basic operations."""
        return False

    @property
    def parts(self) -> Sequence["BasicOperation"]:
        """The basic operations that it stands for, in order."""
        raise NotImplementedError


class BasicOperation(FusibleOperation):
    """One operation, which may take extra inputs and give extra outputs.

    A slot of these may be bound to a channel: an output of one operation is then the input of a later one in the same
    Sequential. UserError for a slot that does not exist, and for a channel that is bound after a first call.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    takes: ClassVar[tuple[str, ...]] = ()
    """The keyword arguments of a call."""

    @property
    def parts(self) -> Sequence["BasicOperation"]:
        return (self,)

    @property
    def channels(self) -> dict[tuple[str, int], tuple[str, bool]]:
        """("input" or "output", slot) -> (channel, whether the caller gets the output, too)."""
        return self.__dict__.setdefault("_channels", {})

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Take an extra input from a channel; None: from the caller."""
        self._bind("input", index, channel, True)
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Give an extra output to a channel, and to the caller unless output_to_caller is False."""
        if not isinstance(output_to_caller, bool):
            raise TypeError("output_to_caller must be a bool")
        self._bind("output", index, channel, output_to_caller)
        return self

    def _bind(self, side: str, index: int, channel: str | None, to_caller: bool) -> None:
        count, kind = getattr(self, f"num_extra_{side}s"), type(self).__name__
        if not 0 <= index < count:
            raise IndexError(f"{kind}: slot {index} is out of range; there are {count} extra {side}s")
        if channel is not None and not (isinstance(channel, str) and channel):
            raise UserError(f"{kind}: channel is {shown(channel)}; it must be a non-empty string or None")
        if self.__dict__.get("_captured", False):
            raise RuntimeError(
                f"Cannot change extra tensor channels of {kind}: a Sequential has already captured them; build new"
                " operations"
            )
        self.channels.pop((side, index), None)
        if channel is not None:
            self.channels[side, index] = channel, to_caller

    def num_quantizers(self, mode: str) -> int:
        """How many tensors it quantizes in "forward" or "backward"."""
        roles = self.get_quantizer_roles(mode)
        return 0 if roles is None else len(roles)

    def get_quantizer_roles(self, mode: str) -> list[Any] | None:
        """The roles of the tensors that it quantizes in "forward" or "backward"; None: none."""
        return None

    def run(self, x: Tensor, *extra_inputs: Tensor, **options: Any) -> Any:
        """y, or (y, extra outputs): by default y of op_forward(), whose gradient op_backward() computes."""
        return _OfContext.apply(x, self, options, *self.parameters())

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **options: Any,
    ) -> Tensor:
        """y of input_. ctx keeps what op_backward() needs; the quantizers are None."""
        raise NotImplementedError(f"{type(self).__name__} has no op_forward()")

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor, Iterable[Tensor | None]]:
        """The gradient of input_, and the gradients of the parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no op_backward()")

    def forward(self, input: Tensor, *extra_inputs: Tensor, **options: Any) -> Any:
        """The operation by itself. UserError for another number of extra inputs."""
        self._captured = True
        if len(extra_inputs) != self.num_extra_inputs:
            raise UserError(
                f"{type(self).__name__}: it takes {self.num_extra_inputs} extra inputs, and got {len(extra_inputs)}"
            )
        return self.run(input, *extra_inputs, **options)


class _OfContext(torch.autograd.Function):
    """A user's op_forward() and op_backward()."""

    @staticmethod
    def forward(ctx, x: Tensor, op: BasicOperation, options: Mapping[str, Any], *parameters: Tensor) -> Tensor:
        ctx.context, ctx.op = OperationContext(any(ctx.needs_input_grad)), op
        quantizers = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
        y = op.op_forward(ctx.context, x.detach(), **quantizers, **options)
        ctx.save_for_backward(*ctx.context.to_save)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.context.saved_tensors = ctx.saved_tensors
        dx, gradients = ctx.op.op_backward(ctx.context, dy)
        return dx, None, None, *gradients
