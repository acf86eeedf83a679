"""The activations of an MLP by TransformerEngine's names, computed in float32.

A gated activation takes [a, b], one half of the width each, and is f(a) * b. "gelu" and "swiglu" are hqsweep.nn's, with
their kernels; others are torch's operators.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.compat.arguments import refuse
from hqsweep.nn.layernorm_linears import activate, gelu


def qgelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square()


SINGLE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu, "qgelu": qgelu, "relu": F.relu, "srelu": srelu, "silu": F.silu
}  # fmt: skip
GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "geglu": gelu, "qgeglu": qgelu, "reglu": F.relu, "sreglu": srelu, "swiglu": F.silu, "glu": torch.sigmoid
}  # fmt: skip
"""Gated activation -> the function of its first half."""


def inputs(kind: str) -> int:
    """The width of an activation's input, divided by that of its output."""
    return 1 if kind in SINGLE else 2


def gated(x: Tensor, kind: str) -> Tensor:
    """f(a) * b with [a, b] = x."""
    a, b = x.chunk(2, dim=-1)
    return GATES[kind](a) * b


def clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    """a * sigmoid(alpha a) * (b + offset), with a at most limit, and b within -limit and limit."""
    a, b = x.chunk(2, dim=-1)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + glu_linear_offset)


def activation_of(where: str, kind: str, params: Mapping[str, float] | None) -> Callable[[Tensor], Tensor]:
    """The activation of a module. UserError for params of another activation than clamped_swiglu."""
    if kind == "clamped_swiglu":
        own = dict(params or {})
        known = ("limit", "alpha", "glu_linear_offset")
        refuse(where, {f"activation_params[{name!r}]": True for name in own if name not in known})
        return partial(_in_float32, partial(clamped_swiglu, **own))
    refuse(where, {"activation_params": bool(params)})
    if kind in ("gelu", "swiglu"):
        return partial(_activated, kind)
    return partial(_in_float32, SINGLE[kind] if kind in SINGLE else partial(gated, kind=kind))


def _activated(kind: str, z: Tensor) -> Tensor:
    return activate(z, kind)


def _in_float32(function: Callable[..., Any], z: Tensor) -> Tensor:
    return function(z.float())
