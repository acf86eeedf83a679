"""transformer_engine.pytorch.GroupedLinear, by its names, on this package's GroupedLinear."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.compat.modules.activation_dtype import InActivationDtype, built_in, params_dtype
from hqsweep.compat.modules.later_gradients import LaterGradients
from hqsweep.compat.modules.parts import check_ranks, drawn_whole, link_part, materialize, part_of, ranks_of, write_part
from hqsweep.compat.signatures import GROUPED_LINEAR, OF_GROUPED_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.core.options import GroupedLinearOptions
from hqsweep.nn.grouped import ExpertParameters
from hqsweep.nn.grouped_linear import GroupedLinear as _GroupedLinear
from hqsweep.parallel.shared.call import LinearShare
from hqsweep.parallel.shared.experts import SharedExperts

OPTIONS = (
    "bias", "fuse_wgrad_accumulation", "save_original_input", "single_grouped_weight", "single_grouped_bias",
)  # fmt: skip
"""Arguments that are options of this package's GroupedLinear."""


class GroupedLinear(LaterGradients, TakesKeys, InActivationDtype, _GroupedLinear):
    """num_gemms experts, in high precision outside of autocast, in the dtype of x.

    parallel_mode notes on the parameters how they are cut (set_tensor_parallel_attributes). With tp_size, or a tp_group
    of several ranks, weights are this rank's part along out_features ("column") or in_features ("row"). As in
    TransformerEngine the caller gathers x and sums y, or dx, and sequence_parallel has no effect. Every rank has the
    same rows. Operands have the bytes of the whole: ranks exchange amaxes where a format has one for the whole.
    return_bias: a call returns y without biases, and these in a list. delay_wgrad_compute: dw waits for backward_dw().
    init_method draws the weights [out_features, in_features] one after the other, whole on every rank.

    UserError for an unsupported option that would change a number; at the call, for parts that cut a block, and without
    the group.
    """

    @GROUPED_LINEAR.builds
    def __init__(self, num_gemms: int, in_features: int, out_features: int, *positional: Any, **arguments: Any) -> None:
        given = GROUPED_LINEAR.given(positional, arguments)
        parallel_mode, tp_group, init_method = given["parallel_mode"], given["tp_group"], given["init_method"]
        dtype = params_dtype(given["params_dtype"])
        self._mode, self._ranks = parallel_mode, ranks_of(given["tp_size"], tp_group)
        if self._ranks > 1:
            self._check_ranks(in_features, out_features, given["bias"])
        own = [in_features, out_features]
        own[parallel_mode == "column"] //= self._ranks
        state, name = torch.get_rng_state(), given["name"] or "grouped_linear"
        options = GroupedLinearOptions(**{n: bool(given[n]) for n in OPTIONS})
        with built_in(dtype):
            super().__init__(num_gemms, *own, name=name, recipe=high_precision(), dtype=dtype, options=options)
        self.return_bias = bool(given["return_bias"])
        self.delay_wgrad(bool(given["delay_wgrad_compute"]), self._ranks)
        if given["params_dtype"] is not None:
            self.to(dtype)
        self.set_tensor_parallel_attributes(parallel_mode)
        self._draw, self._whole = init_method, (in_features, out_features)
        if self._ranks > 1 or init_method is not None:
            torch.set_rng_state(state)
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        elif self._ranks == 1 and init_method is not None:
            self._take_part()

    def _check_ranks(self, in_features: int, out_features: int, bias: bool) -> None:
        """UserError for options that ranks cannot share."""
        size = {"column": out_features, "row": in_features}.get(self._mode)
        if size is None:
            raise UserError(f"GroupedLinear: tp_size={self._ranks} without a parallel_mode; give 'column' or 'row'")
        if bias:
            raise UserError(
                f"GroupedLinear: with tp_size={self._ranks} what it returns may be a part of a sum, to which"
                " no bias is added; give bias=False"
            )
        if size % self._ranks:
            what = "out_features" if self._mode == "column" else "in_features"
            raise UserError(f"GroupedLinear: {what}={size} does not divide by tp_size={self._ranks}")

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the experts, whose weights become this rank's parts. UserError for another number of
        ranks than tp_size."""
        ranks = 1 if tp_group is None else tp_group.size()
        if ranks != self._ranks:
            raise UserError(f"{self.name}: a tp_group of {ranks} ranks, where tp_size is {self._ranks}")
        if ranks > 1:
            self.parallel = SharedExperts(features=LinearShare(group=tp_group, mode=self._mode, sums=False))
            self.workspace.clear()
        if ranks > 1 or self._draw is not None:
            self._take_part()

    def products(self) -> Sequence[str]:
        return [f"states.{expert}." for expert in range(self.num_experts)]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the weights again, and zero the biases. defer_init: do nothing."""
        if defer_init:
            return
        materialize(self)
        state = torch.get_rng_state()
        super().reset_parameters()
        if self.parallel is not None or (self._ranks == 1 and self._draw is not None):
            torch.set_rng_state(state)
            self._take_part()

    @property
    def _share(self) -> LinearShare | None:
        """How ranks share the features of each expert."""
        return None if self.parallel is None else self.parallel.features

    def _take_part(self) -> None:
        """This rank's parts of weights that every rank draws whole."""
        rank = 0 if self.parallel is None else self.parallel.group.rank()
        wholes = (drawn_whole(self._draw, *self._whole, self.weight_dtype) for _ in range(self.num_experts))
        parts = [part_of(whole, self._mode, rank, self._ranks) for whole in wholes]
        for weight, values in zip(self.weights, [parts] if self.single_grouped_weight else parts, strict=True):
            link_part(self.name, weight, self._share)
            write_part(weight, torch.stack(values) if self.single_grouped_weight else values)

    @property
    def num_gemms(self) -> int:
        """num_experts under its other name."""
        return self.num_experts

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor, *positional: Any, **arguments: Any) -> Any:
        """forward(inp, m_splits). is_first_microbatch has no effect: quantization(cache_weights=True) keeps the
        operands of unchanged weights. UserError for out and dgrad_out."""
        if positional or arguments:
            OF_GROUPED_CALL.given(positional, arguments, self.name)
        if self._ranks > 1:
            check_ranks(self.name, self._ranks, self._share)
            for weight in self.weights:
                link_part(self.name, weight, self._share)  # which load_state_dict may have replaced
        if not self.return_bias:
            return super().forward(self.take(inp), m_splits)
        y = self.product(self.take(inp), m_splits, ExpertParameters(self.weights, []), None)
        return y, [bias.to(y.dtype) for bias in self.biases]
