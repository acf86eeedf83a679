"""The product of experts as an operation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hqsweep.compat.modules.activation_dtype import params_dtype
from hqsweep.compat.modules.grouped_linear import GroupedLinear as _GroupedLinear
from hqsweep.compat.ops.op import BasicOperation, dtype_of
from hqsweep.errors import UserError
from hqsweep.nn.grouped import ExpertParameters
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.recipe.roles import QuantizerRole

OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY = "output", "grad_input"


class GroupedLinear(BasicOperation, _GroupedLinear):
    """y = x @ weight_i.T (+ bias_i) for the rows of each expert, whose numbers are the first extra input.

    scale_bias: the second extra input [rows] multiplies the bias of each row. It is an operator on experts, with the
    roles of hqsweep.compat's GroupedLinear: "grouped_linear". UserError for caller's buffers.
    """

    num_extra_inputs = 1

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        options = {"bias": bias, "params_dtype": params_dtype(dtype), "delay_wgrad_compute": delay_wgrad_compute}
        options |= {"fuse_wgrad_accumulation": accumulate_into_main_grad}
        options |= {"single_grouped_weight": single_grouped_weight, "single_grouped_bias": single_grouped_bias}
        _GroupedLinear.__init__(self, num_groups, in_features, out_features, **options)
        self.scale_bias = bool(scale_bias and bias)
        self.num_extra_inputs = 1 + self.scale_bias

    def get_quantizer_roles(self, mode: str | None = None, *, fwd: bool = True) -> list[QuantizerRole]:
        if mode is None:  # as modules are asked
            return super(BasicOperation, self).get_quantizer_roles(fwd=fwd)
        tensors = {"forward": ("input", "weight"), "backward": ("grad_output",)}[mode]
        own = [QuantizerRole("grouped_linear", tensor, self.name) for tensor in tensors]
        return own * self.num_experts

    def run(self, x: Tensor, splits: Tensor, scales: Tensor | None = None, **options: Any) -> Tensor:
        if any(value is not None for value in options.values()):
            raise UserError(f"{self.name}: buffers of the caller ({', '.join(options)}) have no counterpart here")
        x = self.take(in_dtype(x, dtype_of(x, self.weights[0])))
        sizes = splits.tolist() if splits.device.type == "cpu" else splits
        biases = [] if self.scale_bias else self.biases
        y = self.product(x, sizes, ExpertParameters(self.weights, biases), None)
        if scales is None:
            return y
        rows = torch.cat([b.reshape(-1, y.shape[-1]) for b in self.biases]).repeat_interleave(
            splits.to(y.device), dim=0
        )
        return y + in_dtype(rows * scales.unsqueeze(-1), y.dtype)
