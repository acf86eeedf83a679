"""Guards around products: torch's autocast is off, second derivatives are refused, and traces give right gradients.

torch.autocast would turn a float32 product of exact operands into bfloat16, in forward, and in a backward that runs
inside it. A backward with quantized operands is not differentiable: autograd would treat its tensors as constants, and
second derivatives would be wrong.

torch.compile of torch 2.11 silently gives zero gradients to the inputs of an autograd function in one case: the tensor
that forward returns was changed in place, or returned unchanged by .to(), so that one tensor is two nodes of the graph.
`returned` makes it a node of its own.
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
    """Return whether torch.autocast is on for this device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def outside_autocast(forward: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate forward(module, x, ...) so that torch's autocast is off on x's device."""

    @wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Result:
        x = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        if in_autocast(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return run


def untraced(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function so that it runs eagerly under torch.compile.

    torch.compiler.disable would import torch._dynamo at once, which takes a second. During a trace it is imported
    already.
    """
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
    """Raise UserError under transforms that replace products, since these read memory by address.

    A trace may be inside a transform.
    """
    if not torch.compiler.is_compiling():
        raise UserError(
            f"{name}: torch.func (grad, vjp, jvp, vmap, jacrev), forward-mode AD and is_grads_batched=True cannot look"
            " into quantized products; take torch.autograd, one gradient at a time, or revert the model first"
        )


def returned(y: Tensor) -> Tensor:
    """Return y as the forward of an autograd function should: as a view in a trace, else as it is."""
    return y.view_as(y) if torch.compiler.is_compiling() else y


def once_differentiable(backward: Callable[[Any, Tensor], Result]) -> Callable[[Any, Tensor], Result]:
    """Decorate backward(ctx, gradient) of a function with ctx.call: autocast is off, and create_graph=True raises
    UserError."""

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
