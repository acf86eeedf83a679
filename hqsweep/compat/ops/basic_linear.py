"""The product of a linear, and its bias, as two operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.arguments import refuse
from hqsweep.compat.modules.activation_dtype import params_dtype
from hqsweep.compat.modules.linear import Linear as _Linear
from hqsweep.compat.ops.op import BasicOperation, dtype_of
from hqsweep.nn.core.call import NOTHING, KnownInput, LinearCall
from hqsweep.nn.linears import linear_product
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.recipe.roles import QuantizerRole


class BasicLinear(BasicOperation, _Linear):
    """y = x @ weight.T in the dtype of the weight, or of torch.autocast, with the roles of a linear.

    tensor_parallel_mode, tensor_parallel_group and sequence_parallel are parallel_mode, tp_group and sequence_parallel
    of hqsweep.compat's Linear. Its name in roles is `name`, which may be assigned. UserError for userbuffers_options.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        refuse("BasicLinear", {"userbuffers_options": bool(userbuffers_options)})
        shared = {"parallel_mode": tensor_parallel_mode, "tp_group": tensor_parallel_group}
        shared |= {"sequence_parallel": sequence_parallel, "fuse_wgrad_accumulation": accumulate_into_main_grad}
        _Linear.__init__(self, in_features, out_features, bias=False, params_dtype=params_dtype(dtype), **shared)

    def get_quantizer_roles(self, mode: str | None = None, *, fwd: bool = True) -> list[QuantizerRole]:
        if mode is None:  # as modules are asked
            return super(BasicOperation, self).get_quantizer_roles(fwd=fwd)
        tensors = {"forward": ("input", "weight"), "backward": ("grad_output",)}[mode]
        return [QuantizerRole("linear", tensor, self.name) for tensor in tensors]

    def run(self, x: Tensor, *, bias: Tensor | None = None, known: KnownInput = NOTHING) -> Tensor:
        """x @ weight.T (+ bias). known: facts of x that are known before it is quantized."""
        x = self.take(in_dtype(x, dtype_of(x, self.weight)))
        if self.parallel is not None:
            y = self._product(x, known)
            return y if bias is None else y + bias.to(y.dtype)
        return linear_product(LinearCall(**self.linear_facts()), x, self.weight, bias, known)

    @property
    def in_features(self) -> int:
        """The width of x."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The width of y."""
        return self.weight.shape[0]


class Bias(BasicOperation):
    """x + bias. UserError for tensor_parallel."""

    def __init__(
        self,
        size: int,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        refuse("Bias", {"tensor_parallel": tensor_parallel})
        self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype(dtype)))

    def reset_parameters(self) -> None:
        """Zero the bias."""
        nn.init.zeros_(self.bias)

    def run(self, x: Tensor) -> Tensor:
        return x + self.bias
