"""transformer_engine.pytorch.GroupedLinear, by its names, on this package's GroupedLinear."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.compat.arguments import SAYS_NOTHING, refuse
from hqsweep.compat.linear import drawn_whole, part_of
from hqsweep.errors import UserError
from hqsweep.nn.context import HIGH_PRECISION
from hqsweep.nn.grouped_linear import GroupedLinear as _GroupedLinear
from hqsweep.nn.options import GroupedLinearOptions
from hqsweep.quant.part import CUTS, Part, check_part


class GroupedLinear(_GroupedLinear):
    """num_gemms experts, in high precision outside of autocast.

    parallel_mode notes on the parameters how they are cut (set_tensor_parallel_attributes). With tp_size, or a tp_group
    of several ranks, weights are this rank's part, of out_features ("column") or in_features ("row"); as in
    TransformerEngine nothing is exchanged: the caller gathers x and sums y, or dx, and sequence_parallel says nothing.
    Formats are those whose parts have the bytes of the whole: without scales of whole tensors and random bits.
    init_method draws the weights [out_features, in_features], one after the other, whole on every rank. UserError for
    an option that would change a number and is not there, and at the call for other formats and parts that cut a block.
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
        refuse("GroupedLinear", unsupported, (*SAYS_NOTHING, "sequence_parallel"))
        self._mode, self._ranks = parallel_mode, tp_size if tp_group is None else tp_group.size()
        if self._ranks > 1:
            self._check_ranks(in_features, out_features, bias)
        own = [in_features, out_features]
        own[parallel_mode == "column"] //= self._ranks
        state = torch.get_rng_state()
        super().__init__(
            num_gemms,
            *own,
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
        self.set_tensor_parallel_attributes(parallel_mode)
        self._draw, self._whole = init_method, (in_features, out_features)
        if self._ranks > 1 and any(hasattr(weight, "quantizer") for weight in self.expert_weights()):
            raise UserError(
                "GroupedLinear: a part of a weight is not held quantized; build it outside of quantized_model_init"
            )
        if self._ranks > 1 or init_method is not None:
            torch.set_rng_state(state)
        if tp_group is not None:
            self.set_tensor_parallel_group(tp_group)
        elif self._ranks == 1 and init_method is not None:
            self._take_part(0)

    def _check_ranks(self, in_features: int, out_features: int, bias: bool) -> None:
        """UserError for what ranks cannot share."""
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
        """The ranks that share the experts, whose weights become the parts of this one. UserError for another number of
        them than tp_size."""
        ranks = 1 if tp_group is None else tp_group.size()
        if ranks != self._ranks:
            raise UserError(f"{self.name}: a tp_group of {ranks} ranks, where tp_size is {self._ranks}")
        if ranks > 1 or self._draw is not None:
            self._take_part(0 if tp_group is None else tp_group.rank())

    def _take_part(self, rank: int) -> None:
        """The weights of this rank, of wholes that are drawn on every one."""
        with torch.no_grad():
            for weight in self.expert_weights():
                whole = drawn_whole(self._draw, *self._whole, weight.dtype)
                weight.copy_(part_of(whole, self._mode, rank, self._ranks))

    @property
    def num_gemms(self) -> int:
        """num_experts under its other name."""
        return self.num_experts

    def forward(self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """is_first_microbatch says nothing: quantization(cache_weights=True) keeps weights that nobody has written."""
        if self._ranks > 1:
            self._check_parts()
        return super().forward(inp, m_splits)

    def _check_parts(self) -> None:
        """UserError for quantizers of whose whole operands a rank cannot make its part alone."""
        quantizers, (inputs, outputs) = self.active_quantizers(), (self.in_features, self.out_features)
        shapes = {"input": (1, inputs), "weight": (outputs, inputs), "grad_output": (1, outputs)}
        for tensor, axis in CUTS[self._mode].items():
            quantizer = getattr(quantizers, tensor)
            if tensor not in shapes:
                continue
            for format in (quantizer.rowwise, quantizer.columnwise):
                if format.amax_name is not None or format.stochastic:
                    raise UserError(
                        f"{self.name}: {tensor}: {format} has scales or random bits of the whole, of which a rank of"
                        f" tp_size={self._ranks} has a part; take a format of blocks, without +sr"
                    )
            part = Part(group=None, axis=axis)
            check_part(quantizer, torch.empty(shapes[tensor], device="meta"), part, "codes", "codes")
