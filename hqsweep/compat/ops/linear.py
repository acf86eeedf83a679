"""The operation of a whole linear: a product and a bias."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.ops.basic_linear import BasicLinear, Bias
from hqsweep.compat.ops.fuser import FusedOperation
from hqsweep.errors import UserError


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
