"""A product that another library computes, reported to a probe as those of hqsweep.nn are, without changing a bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hqsweep.nn.linear.linear import as_rows
from hqsweep.nn.linear.linear_call import LinearCall
from hqsweep.ops.quantize.kernels import in_dtype


class _Shown(torch.autograd.Function):
    """x as it is, whose gradient is shown to `look`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[Tensor], None]) -> Tensor:
        ctx.look = look
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look(gradient.detach())
        return gradient, None


def probed_product(call: LinearCall, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """product(x, weight) -> y [..., N], for x [..., K] and weight [N, K]; the probe of the call sees its tensors, and
    its products beside those of float32."""
    seen: dict[str, Tensor] = {}

    def rows(tensor: Tensor) -> Tensor:
        return in_dtype(as_rows(tensor.detach()), call.dtype)

    def look_at_dy(gradient: Tensor) -> None:
        seen["dy"] = rows(gradient)
        call.probe_parts("grad_output", seen["dy"])

    def look_at_dx(gradient: Tensor) -> None:
        call.probe_gemms("dgrad", [seen["dy"]], [originals[0].t()], [rows(gradient)])

    def look_at_dw(gradient: Tensor) -> None:
        call.probe_gemms("wgrad", [seen["dy"].t()], [inputs.t()], [gradient])

    shown_weight = _Shown.apply(weight, look_at_dw)
    y = product(_Shown.apply(x, look_at_dx), shown_weight)
    inputs, originals = call.probe_forward(rows(x), [weight.detach()], rows(y))
    if y.requires_grad:
        y.register_hook(look_at_dy)
    return y
