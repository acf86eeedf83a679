"""transformer_engine.pytorch.LayerNorm and RMSNorm, by their names, in high precision."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.compat.arguments import built_on, flag, refuse, taken
from hqsweep.compat.modules.activation_dtype import params_dtype as dtype_of
from hqsweep.compat.modules.parts import materialize
from hqsweep.errors import UserError
from hqsweep.nn.core.guards import in_autocast


class _Norm(nn.Module):
    """Base of both. The call computes in float32 from values in the dtype of the parameters, or of torch.autocast, and
    returns that dtype.

    zero_centered_gamma: the gain is 1 + weight. sequence_parallel: an attribute of the parameters, by which Megatron
    sums their gradients. device="meta": no memory before reset_parameters(). sm_margin has no effect. UserError for an
    argument that TransformerEngine lacks.
    """

    has_bias = False

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        kind, shape = type(self).__name__, hidden_size if normalized_shape is None else normalized_shape
        if shape is None:
            raise UserError(f"{kind}: normalized_shape is missing")
        given = kwargs.pop("dtype", None) if params_dtype is None else params_dtype
        refuse(kind, {name: value for name, value in kwargs.items() if name not in ("device", "sm_margin")})
        self.eps = taken(kind, "eps", eps, 1e-5)
        self.zero_centered_gamma = flag(kind, "zero_centered_gamma", zero_centered_gamma)
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = dtype_of(taken(kind, "params_dtype", given, None))
        with built_on(kwargs.get("device")):
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(self.normalized_shape, dtype=dtype)) if self.has_bias else None
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = bool(sequence_parallel)
        self._fill()

    def reset_parameters(self) -> None:
        """A gain of 1, and no bias; parameters on the meta device get memory first."""
        materialize(self)
        self._fill()

    def _fill(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., *normalized_shape]."""
        dtype = self.weight.dtype
        if in_autocast(x.device):
            dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            gain, bias = (None if p is None else p.to(dtype).float() for p in (self.weight, self.bias))
            gain = gain + 1 if self.zero_centered_gamma else gain
            return self._normed(x.to(dtype).float(), gain, bias).to(dtype)

    def _normed(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class LayerNorm(_Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * gain + bias."""

    has_bias = True

    def _normed(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, gain, bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gain."""

    def _normed(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, gain, self.eps)


class L2Normalization(nn.Module):
    """x / sqrt(sum(x^2) + eps) along the last axis, in float32, in the dtype of x."""

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D]."""
        wide = x.float()
        return (wide * (wide.square().sum(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


def qk_norm(width: int, given: Mapping[str, Any]) -> nn.Module | None:
    """The norm of the queries, or of the keys, that qk_norm_type asks for; None without it."""
    kind, eps = given["qk_norm_type"], given["qk_norm_eps"]
    if kind in (None, "L2Normalization"):
        return None if kind is None else L2Normalization(eps=eps)
    return (RMSNorm if kind == "RMSNorm" else LayerNorm)(width, eps=eps, params_dtype=given["params_dtype"])
