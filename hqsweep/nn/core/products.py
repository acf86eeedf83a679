"""What forms products: torch's autocast does not reach them, gradients of gradients are refused, and traces are whole.

torch.autocast would give a float32 product of exact operands to bfloat16, in forward, and in backward where that is
called inside of it. A backward whose operands are quantized is no differentiable function: autograd would take its
tensors for constants, and second derivatives would be wrong.

torch.compile of torch 2.11 gives the inputs of an autograd function zeros for gradients, in silence, where the tensor
that its forward returns was changed in place, or given back by .to() as it was: one tensor is then two nodes of its
graph. `returned` makes it one of its own.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.memo import constant_result
from hqsweep.torch_private import is_legacy_batched

Result = TypeVar("Result")


def in_autocast(device: torch.device) -> bool:
    """Whether torch.autocast is on there; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def outside_autocast(forward: Callable[..., Result]) -> Callable[..., Result]:
    """forward(module, x, ...) with torch's autocast disabled on x's device."""

    @wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Result:
        x = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        if in_autocast(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return run


def untraced(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, which runs eagerly where torch.compile meets it. torch.compiler.disable would import torch._dynamo
    at once, which takes a second; it is imported by the time of a trace."""
    name = f"{function.__module__}.{function.__qualname__}"

    @constant_result
    def prepare() -> bool:
        if name not in _UNTRACED:
            _UNTRACED[name] = torch.compiler.disable(function)
        return True

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        if torch.compiler.is_compiling() and prepare():
            return _UNTRACED[name](*args, **kwargs)
        return function(*args, **kwargs)

    return run


_UNTRACED: dict[str, Callable[..., Any]] = {}


def refuse_transforms(name: str) -> None:
    """UserError for what looks into products that read memory by address; a trace may be within such a transform."""
    if not torch.compiler.is_compiling():
        raise UserError(
            f"{name}: torch.func (grad, vjp, jvp, vmap, jacrev), forward-mode AD and is_grads_batched=True cannot look"
            " into quantized products; take torch.autograd, one gradient at a time, or revert the model first"
        )


def returned(y: Tensor) -> Tensor:
    """y as the forward of an autograd function returns it: in a trace a view."""
    return y.view_as(y) if torch.compiler.is_compiling() else y


def once_differentiable(backward: Callable[[Any, Tensor], Result]) -> Callable[[Any, Tensor], Result]:
    """backward(ctx, gradient) of a function with ctx.call, with torch's autocast disabled; UserError where autograd
    records it, for create_graph=True."""

    @wraps(backward)
    def run(ctx: Any, gradient: Tensor) -> Result:
        if not torch.compiler.is_dynamo_compiling() and is_legacy_batched(gradient):
            refuse_transforms(ctx.call.name)
        if torch.is_grad_enabled():
            raise UserError(
                f"{ctx.call.name}: create_graph=True asks for gradients of gradients; a quantized backward has none;"
                " leave it out, or take a module of torch.nn in this place"
            )
        if in_autocast(gradient.device):
            with torch.autocast(gradient.device.type, enabled=False):
                return backward(ctx, gradient)
        return backward(ctx, gradient)

    return run
