"""The bases of fusible operations: what a Sequential runs, one after the other.

An operation of this package is a function of torch in run(). A user's own BasicOperation has op_forward() and
op_backward() with a context, or fuser_forward() and fuser_backward(), as in TransformerEngine.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hqsweep.compat.arguments import shown
from hqsweep.compat.ops.passes import OperationContext, Stretch
from hqsweep.errors import UserError
from hqsweep.nn.core.guards import in_autocast


def dtype_of(x: Tensor, parameter: Tensor) -> torch.dtype:
    """The dtype of an operation with parameters: of these, or of torch.autocast."""
    return torch.get_autocast_dtype(x.device.type) if in_autocast(x.device) else parameter.dtype


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

    @property
    def is_of_user(self) -> bool:
        """Whether fuser_forward() and fuser_backward() compute it, in place of run()."""
        raise NotImplementedError

    def fuser_forward(
        self,
        basic_op_ctxs: Sequence[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor | None]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """y of input_, and the extra outputs of each basic operation. The quantizers are None."""
        raise NotImplementedError(f"{type(self).__name__} has no fuser_forward()")

    def fuser_backward(
        self,
        basic_op_ctxs: Sequence[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> tuple[Tensor, Sequence[Iterable[Tensor | None]], Sequence[Iterable[Tensor | None]]]:
        """The gradients of input_, and of the parameters and the extra inputs of each basic operation."""
        raise NotImplementedError(f"{type(self).__name__} has no fuser_backward()")


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
                f"Cannot change extra tensor channels of {kind}: a Sequential has already captured its channel routing;"
                " build new operations"
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

    @property
    def is_of_user(self) -> bool:
        return type(self).run is BasicOperation.run

    def run(self, x: Tensor, *extra_inputs: Tensor, **options: Any) -> Any:
        """y, or (y, extra outputs): by default of fuser_forward(), whose gradients fuser_backward() computes."""
        alone = [(self, [0])]
        y, (extra,) = Stretch(ops=[self], forward=alone, backward=alone, sources={})(x, [extra_inputs], [options])
        return (y, *extra) if extra else y

    def fuser_forward(
        self,
        basic_op_ctxs: Sequence[OperationContext],
        input_: Tensor,
        *,
        basic_op_kwargs: Sequence[dict[str, Any]],
        **others: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor | None]]]:
        """y of op_forward(), and no extra outputs."""
        quantizers = {name: others[name] for name in ("prev_op_grad_output_quantizer", "next_op_input_quantizer")}
        return self.op_forward(basic_op_ctxs[0], input_, **quantizers, **basic_op_kwargs[0]), [()]

    def fuser_backward(
        self, basic_op_ctxs: Sequence[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor, Sequence[Iterable[Tensor | None]], Sequence[Iterable[Tensor | None]]]:
        """The gradients of op_backward()."""
        dx, gradients = self.op_backward(basic_op_ctxs[0], grad_output)
        return dx, [gradients], [()]

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
