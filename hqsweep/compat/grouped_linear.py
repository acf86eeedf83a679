"""transformer_engine.pytorch.GroupedLinear, by its names, on this package's GroupedLinear."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.nn.context import HIGH_PRECISION
from hqsweep.nn.grouped_linear import GroupedLinear as _GroupedLinear
from hqsweep.nn.options import GroupedLinearOptions

SAYS_NOTHING = ("device", "get_rng_state_tracker", "rng_tracker_name", "sequence_parallel")
"""Arguments that change no number where tensor parallelism has one rank, which it has here."""


class GroupedLinear(_GroupedLinear):
    """num_gemms experts, in high precision outside of autocast.

    parallel_mode notes on the parameters how they are cut (set_tensor_parallel_attributes). init_method draws the
    weights [out_features, in_features], one after the other. UserError for an option that would change a number and is
    not there, such as tp_size=2 or a tp_group of 2 ranks.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **unsupported: Any,
    ) -> None:
        ranks = 1 if tp_group is None else tp_group.size()
        unsupported |= {"tp_size": tp_size if tp_size != 1 else None}
        unsupported |= {"tp_group of size": ranks if ranks > 1 else None}
        refused = [f"{n}={v!r}" for n, v in unsupported.items() if n not in SAYS_NOTHING and v not in (None, False, 0)]
        if refused:
            raise UserError(f"GroupedLinear: {', '.join(refused)} has no counterpart here; leave it out")
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            name=name or "grouped_linear",
            recipe=HIGH_PRECISION,
            options=GroupedLinearOptions(
                bias=bias,
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                save_original_input=save_original_input,
                single_grouped_weight=single_grouped_weight,
                single_grouped_bias=single_grouped_bias,
            ),
        )
        if params_dtype is not None:
            self.to(params_dtype)
        if init_method is not None:
            with torch.no_grad():
                for weight in self.expert_weights():
                    init_method(weight)
        self.set_tensor_parallel_attributes(parallel_mode)

    @property
    def num_gemms(self) -> int:
        """num_experts under its other name."""
        return self.num_experts

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """is_first_microbatch says nothing: quantization(cache_weights=True) keeps weights that nobody has written."""
        return super().forward(inp, m_splits)
