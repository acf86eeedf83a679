"""Norms as operations, on hqsweep.nn's Norm, whose kernels a linear that follows may read from."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hqsweep.compat.modules.activation_dtype import params_dtype
from hqsweep.compat.modules.linear import centered_gain
from hqsweep.compat.modules.norms import L2Normalization as _L2Normalization
from hqsweep.compat.ops.op import BasicOperation, dtype_of
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.norm_embedding import Norm
from hqsweep.ops.quantize.kernels import in_dtype


class NormOperation(BasicOperation, Norm):
    """Base of both: computed in float32, in the dtype of the weight, or of torch.autocast.

    zero_centered_gamma: the gain is 1 + weight. device and sm_margin have no effect.
    """

    normalization: ClassVar[str]

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        options = {"normalization": self.normalization, "epsilon": eps, "recipe": high_precision()}
        Norm.__init__(self, math.prod(shape), name="norm", **options)
        self.normalized_shape, self.zero_centered_gamma = shape, zero_centered_gamma
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(parameter.detach().view(shape).to(params_dtype(dtype))))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to one, the bias to zero."""
        super().reset_parameters()
        if self.zero_centered_gamma:
            nn.init.zeros_(self.weight)

    def quantized_weight(self) -> Tensor:
        weight = super().quantized_weight().flatten()
        return centered_gain(weight) if self.zero_centered_gamma else weight

    def _own_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.flatten()

    def run(self, x: Tensor) -> Tensor:
        dtype, shape = dtype_of(x, self.weight), x.shape
        rows = in_dtype(x, dtype).reshape(*shape[: x.dim() - len(self.normalized_shape)], -1)
        return self.added(rows, None, dtype)[1].view(shape)


class LayerNorm(NormOperation):
    """(x - mean(x)) / sqrt(var(x) + eps) * gain + bias."""

    normalization = "LayerNorm"


class RMSNorm(NormOperation):
    """x / sqrt(mean(x^2) + eps) * gain."""

    normalization = "RMSNorm"


class L2Normalization(BasicOperation, _L2Normalization):
    """x / sqrt(sum(x^2) + eps) along the last axis. seq_length and micro_batch_size have no effect."""

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        _L2Normalization.__init__(self, eps=eps)

    def run(self, x: Tensor) -> Tensor:
        return _L2Normalization.forward(self, x)
