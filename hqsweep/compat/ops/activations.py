"""Activations as operations, computed in float32, in the dtype of x or of torch.autocast.

A gated one takes [a, b], one half of the width each. With glu_interleave_size=n, a and b alternate in blocks of n. The
"scaled" ones multiply each row by an extra input [...].
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hqsweep.compat.arguments import flag
from hqsweep.compat.modules.activation_dtype import activations
from hqsweep.compat.modules.activations import activation_of, clamped_swiglu
from hqsweep.compat.ops.op import BasicOperation
from hqsweep.compat.quantizers import DType, Float8CurrentScalingQuantizer
from hqsweep.errors import UserError
from hqsweep.ops.quantize.kernels import in_dtype


class Activation(BasicOperation):
    """Base of all. cache_quantized_input: x is saved for backward as FP8 with one scale (E4M3)."""

    kind: ClassVar[str]
    """The name in hqsweep.compat's LayerNormMLP."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = flag(type(self).__name__, "cache_quantized_input", cache_quantized_input)

    def run(self, x: Tensor) -> Tensor:
        x = activations(type(self).__name__, x)
        return _OfCodes.apply(x, self._in_dtype) if self.cache_quantized_input else self._in_dtype(x)

    def _in_dtype(self, x: Tensor) -> Tensor:
        return in_dtype(self.activated(x), x.dtype)

    def activated(self, x: Tensor) -> Tensor:
        """The activation in float32, or in x's dtype by a kernel."""
        return activation_of(type(self).__name__, self.kind, None)(x)


class _OfCodes(torch.autograd.Function):
    """A function of x, whose gradient is taken at the values of x in FP8."""

    @staticmethod
    def forward(ctx, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)
        ctx.codes, ctx.shape, ctx.function = quantizer(x.reshape(1, -1)), x.shape, function
        return function(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.codes.dequantize().view(ctx.shape).requires_grad_()
            return torch.autograd.grad(ctx.function(x), x, dy)[0], None


class GELU(Activation):
    """GELU by its tanh approximation."""

    kind = "gelu"


class GEGLU(Activation):
    """gelu(a) * b."""

    kind = "geglu"


class GLU(Activation):
    """sigmoid(a) * b."""

    kind = "glu"


class QGELU(Activation):
    """x * sigmoid(1.702 x)."""

    kind = "qgelu"


class QGEGLU(Activation):
    """qgelu(a) * b."""

    kind = "qgeglu"


class ReLU(Activation):
    """max(x, 0)."""

    kind = "relu"


class ReGLU(Activation):
    """relu(a) * b."""

    kind = "reglu"


class SReLU(Activation):
    """relu(x)^2."""

    kind = "srelu"


class SReGLU(Activation):
    """relu(a)^2 * b."""

    kind = "sreglu"


class SiLU(Activation):
    """x * sigmoid(x)."""

    kind = "silu"


class Interleaved(Activation):
    """Base of gated ones whose halves may alternate in blocks."""

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size

    def run(self, x: Tensor) -> Tensor:
        return super().run(apart(x, self.glu_interleave_size))


class SwiGLU(Interleaved):
    """silu(a) * b."""

    kind = "swiglu"


class SiTUGLU(Interleaved):
    """beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)."""

    def __init__(self, *, beta1: float = 4.0, beta2: float = 25.0, **options: Any) -> None:
        super().__init__(**options)
        for name, beta in {"beta1": beta1, "beta2": beta2}.items():
            if not (math.isfinite(beta) and beta > 0):
                raise ValueError(f"{name} must be finite and positive, got {float(beta)}")
        self.beta1, self.beta2 = float(beta1), float(beta2)

    def activated(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return self.beta1 * torch.tanh(a / self.beta1) * a.sigmoid() * self.beta2 * torch.tanh(b / self.beta2)


class ClampedSwiGLU(Interleaved):
    """a * sigmoid(alpha a) * (b + offset), with a at most limit, and b within -limit and limit."""

    def __init__(
        self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def activated(self, x: Tensor) -> Tensor:
        return clamped_swiglu(x.float(), self.limit, self.alpha, self.glu_linear_offset)


class Scaled(Interleaved):
    """Base of activations whose rows are multiplied by an extra input [...].

    ValueError for activation_recompute_in_mlp, which only ScaledSReLU takes.
    """

    num_extra_inputs = 1
    recomputes = False
    """Whether it takes activation_recompute_in_mlp, which has no effect."""

    def __init__(
        self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False, **options: Any
    ) -> None:
        kind = type(self).__name__
        if activation_recompute_in_mlp and not self.recomputes:
            raise ValueError(f"{kind} does not support activation recomputation in the fused MLP")
        if "cache_quantized_input" in options:
            raise TypeError(f"{kind} takes no cache_quantized_input")
        super().__init__(glu_interleave_size=glu_interleave_size, **options)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def run(self, x: Tensor, scales: Tensor) -> Tensor:
        x = activations(type(self).__name__, x)
        y = self.activated(apart(x, self.glu_interleave_size).float())
        return in_dtype(y * scales.float().unsqueeze(-1), x.dtype)


class ScaledSwiGLU(Scaled, SwiGLU):
    """SwiGLU times the scale of the row."""


class ScaledSReLU(Scaled, SReLU):
    """relu(x)^2 times the scale of the row."""

    recomputes = True

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)


class ScaledSiTUGLU(Scaled, SiTUGLU):
    """SiTUGLU times the scale of the row, by its arguments."""


class ScaledClampedQGeGLU(Scaled, ClampedSwiGLU):
    """ClampedSwiGLU times the scale of the row, by its arguments."""


def apart(x: Tensor, size: int | None) -> Tensor:
    """x [..., 2 n] with its first halves before its second ones, where both alternate in blocks of `size`."""
    if size is None:
        return x
    if x.shape[-1] % (2 * size):
        raise UserError(f"glu_interleave_size={size} does not divide a width of {x.shape[-1]} twice")
    return x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).flatten(-3)
