"""Linear operations: a product, a bias, and both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.arguments import refuse
from hqsweep.compat.modules.activation_dtype import params_dtype
from hqsweep.compat.modules.linear import Linear as _Linear
from hqsweep.compat.ops.op import BasicOperation, FusedOperation
from hqsweep.errors import UserError
from hqsweep.nn.core.products import in_autocast
from hqsweep.nn.linear.linear import linear_product
from hqsweep.nn.linear.linear_call import NOTHING, KnownInput, LinearCall
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.recipe.roles import QuantizerRole


def dtype_of(x: Tensor, parameter: Tensor) -> torch.dtype:
    """The dtype of an operation with parameters: of these, or of torch.autocast."""
    return torch.get_autocast_dtype(x.device.type) if in_autocast(x.device) else parameter.dtype


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


class Linear(FusedOperation):
    """y = x @ weight.T (+ bias): a BasicLinear and a Bias, by their arguments.

    Its state_dict has basic_ops.0.weight and basic_ops.1.bias. UserError for a bias of ranks that share the linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        if bias and tensor_parallel_mode is not None:
            raise UserError(f"ops.Linear: tensor_parallel_mode={tensor_parallel_mode!r} takes no bias; give bias=False")
        linear = BasicLinear(
            in_features,
            out_features,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        super().__init__([linear, Bias(out_features, dtype=dtype)] if bias else [linear])

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features]."""
        return self.basic_ops[0].weight

    @weight.setter
    def weight(self, weight: nn.Parameter) -> None:
        self.basic_ops[0].weight = weight

    @property
    def bias(self) -> Tensor | None:
        """The bias [out_features], or None."""
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None
