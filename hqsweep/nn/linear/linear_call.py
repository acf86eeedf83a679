"""LinearCall: a call of a linear, which has one matrix of weights or one for each expert."""

from collections import UserDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.grouped import mm_t_tokens, mm_t_weights
from hqsweep.gemm.native import multiply
from hqsweep.gemm.plan import GemmPlan
from hqsweep.memo import cached_property
from hqsweep.nn.core.call import Call
from hqsweep.nn.core.parameter import (
    AnyOperand,
    Weights,
    check_held,
    check_main_grad,
    expert_weights,
    held_operands,
    is_gathered,
    is_held,
    link_states,
    weight_matrix,
)
from hqsweep.nn.core.workspace import WeightWorkspace
from hqsweep.ops.quantize.dequantize import dequantize_members
from hqsweep.ops.quantize.fused import Normed
from hqsweep.ops.quantize.nonfinite import for_its_slot
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.overlap.chunked_input import Turns
from hqsweep.parallel.overlap.deferred_reduce import LeftGradient, LeftOutput
from hqsweep.parallel.overlap.overlapped_gemm import RankRows
from hqsweep.parallel.overlap.shared_linear import Exchange
from hqsweep.parallel.shards.gather_operands import Gathering, gathered_operand
from hqsweep.parallel.shards.held_part import own_part
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.wire.p2p_copy import Sending
from hqsweep.parallel.wire.tokens import Pending
from hqsweep.quant.group import quantize_group
from hqsweep.quant.hybrid import DIRECTIONS, Direction, HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand, OperandParts, Skeleton, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.sections import LinearQuantizers

PRODUCTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "weight"}
"""GEMM -> the tensor whose values, or whose gradient, it makes; ranks share its result as they share that tensor."""


class Codes(UserDict[str, Operand]):
    """Tensor -> its rowwise operand, where it has come as codes and has no values (nn.token_codes); it is taken out
    where it is read. This is no dict, for hooks of fully_shard may copy a dict, and backward may have to fill this
    one."""


@dataclass(frozen=True, kw_only=True)
class LinearCall(Call):
    """A call of a linear. With one matrix, splits and plans are None, and every list of this class has one entry."""

    quantizers: LinearQuantizers
    main_grad: bool
    """Whether dw is added to weight.main_grad."""
    save_original: bool
    """Whether x is saved instead of its columnwise operand, which is then made in backward."""
    workspace: WeightWorkspace | None
    input_amaxes: Sequence[Tensor] = ()
    """The amaxes of x that are known beforehand (HybridQuantizer.takes_amaxes)."""
    turns: list[Turns] = field(default_factory=list, compare=False)
    """How x is written, if it is written rank by rank; taken out where it is quantized."""
    early: dict[Direction, AnyOperand] = field(default_factory=dict, compare=False)
    """The weight's operands that were made beforehand; taken out where they are multiplied."""
    sent: list[Sending] = field(default_factory=list, compare=False)
    """The exchange in which the rows of x were sent as they were computed, if they were; taken out as `turns` is."""
    normed: list[Normed] = field(default_factory=list, compare=False)
    """What x is computed of, if x has no values; taken out where it is quantized, so that nothing keeps it."""
    codes: Codes | None = field(default=None, compare=False)
    mean_over: int = 1
    """The number of data-parallel ranks whose rows are multiplied here: gradients of parameters are divided by it, as
    those that are averaged over these ranks."""
    exchange: Exchange | None = None
    """What ranks exchange where they share the linear; None: this one has all of it."""
    left: LeftOutput | None = field(default=None, compare=False)
    """Where y is left to its reader if it is a sum over ranks of rows; None: y is summed."""
    gradient: LeftGradient | None = field(default=None, compare=False)
    """Where dx is left to the norm before, if it is such a sum."""
    plans: Mapping[str, GemmPlan] | None = None
    """"fprop", "dgrad" and "wgrad" -> the plan by which it is computed for all experts."""

    @cached_property
    def singles(self) -> Sequence["LinearCall"]:
        """The call of each expert, as a linear of its own would make it."""
        if self.splits is None:
            return (self,)
        alone = {"splits": None, "weight_splits": None, "plans": None, "workspace": None}
        numbered = enumerate(self.states, self.first_expert)
        return [replace(self, expert=expert, states=states, **alone) for expert, states in numbered]

    def parts(self, x: Tensor) -> list[Tensor]:
        """The rows of each expert; waits for splits that only a device knows."""
        return [x] if self.splits is None else [x[start:end] for start, end in self.splits.spans]

    def by_rows(self, gemm: str) -> bool:
        """Whether the GEMM takes exact columns of experts as torch._grouped_mm does."""
        return self.plans is not None and self.plans[gemm].one_kernel

    def quantize(
        self,
        tensor: str,
        x: Tensor,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        **options: Any,
    ) -> HybridOperand:
        """Call.quantize; an input that is only described is quantized from what it is computed of."""
        if tensor == "input" and self.normed:
            return self._quantize_normed(tensor, x, rowwise=rowwise, columnwise=columnwise)
        if self.codes is not None and tensor in self.codes:
            return self._of_codes(tensor, x, rowwise=rowwise, columnwise=columnwise, **options)
        part = None if self.exchange is None else self.part_of(tensor, x)
        if part is not None:
            by_rows = options.get("by_rows", False)
            return self.quantize_part(tensor, x, part, rowwise=rowwise, columnwise=columnwise, by_rows=by_rows)
        return super().quantize(tensor, x, rowwise=rowwise, columnwise=columnwise, **options)

    def part_of(self, tensor: str, x: Tensor) -> Part | None:
        return None if self.exchange is None else self.exchange.parts.get(tensor)

    def gathered(self, tensor: str, x: Tensor) -> Tensor:
        """x [rows, C], or, where each rank has some of its tokens, the rows of all ranks."""
        return x if self.exchange is None else self.exchange.gathered(tensor, x)

    def tokens_of(self, tensor: str, x: Tensor) -> Part | None:
        """Where the rows of x lie among those of all ranks, if they are some of the tokens; None if they are all."""
        return None if self.exchange is None else self.exchange.tokens(tensor, len(x))

    def summed(self, tensor: str, x: Tensor) -> Tensor:
        """x [rows, C]; where each rank has a part of its sums, the whole sum, or this rank's tokens of it."""
        return self.begin_summed(tensor, x)()

    def begin_summed(self, tensor: str, x: Tensor) -> Pending:
        """summed(), begun: it goes on beside the work that follows (parallel.wire.tokens)."""
        return (lambda: x) if self.exchange is None else self.exchange.begin_summed(tensor, x)

    def output_of(self, pending: Pending) -> Tensor:
        """y, whose sum over ranks was begun; this rank's part of it where the sum is left."""
        return pending() if self.left is None else self.left.leave(pending)

    def gradient_of(self, pending: Pending) -> Tensor:
        """dx, whose sum over ranks was begun; this rank's part of it where the sum is left."""
        if self.gradient is None or self.quantizers.grad_input is not None:
            return pending()
        return self.gradient.leave(pending)

    @for_its_slot
    def _quantize_normed(self, tensor: str, x: Tensor, **outputs: Output | None) -> HybridOperand:
        """quantize() for an input that is only described."""
        return self.quantizer(tensor).quantize_normed(self.normed.pop(), **outputs)

    @for_its_slot
    def _of_codes(
        self, tensor: str, x: Tensor, *, columnwise: Output | None, by_rows: bool = False, **others: Any
    ) -> HybridOperand:
        """quantize() for a tensor whose rowwise operand is here: the columnwise one is made of its values."""
        row, column, quantizer = self.codes.pop(tensor), None, self.quantizer(tensor)
        if columnwise:
            values = dequantize_members(row.buffers, row.format, row.layout, row.dtype)
            of_values = replace(quantizer, columnwise_source="original")
            fields = {"keys": self.key(tensor) if quantizer.reads_key else None, "by_rows": by_rows}
            fields |= {"rowwise": None, "columnwise": columnwise}
            column = quantize_group(values, self.splits, of_values, **fields).columnwise
        exact = others.get("rowwise") == "exact"
        return HybridOperand(rowwise=row.operand() if exact else row, columnwise=column)

    def product(
        self, gemm: str, a: AnyOperand | RankRows, b: AnyOperand, out_dtype: torch.dtype
    ) -> Tensor | Sequence[Tensor]:
        """ "fprop", "dgrad" or "wgrad", the last one for each expert. UserError, with the module's name, for what
        gemm=native has no product for."""
        if self.context.reader is not None:
            self.context.reader(self, gemm, a, b)
        if isinstance(a, RankRows):
            return a.product(b, out_dtype)
        if self.plans is None and self.gemm != "native":
            return mm_t(a, b, out_dtype=out_dtype)
        try:
            if self.plans is None:
                return multiply(a, b, self.gemm, out_dtype)
            of_group = mm_t_weights if gemm == "wgrad" else mm_t_tokens
            return of_group(a, b, self.plans[gemm], out_dtype=out_dtype)
        except UserError as error:
            raise UserError(f"{self.layer}: {error}") from None

    def weight(self, weights: Weights, direction: Direction, *, needs_dx: bool = False) -> AnyOperand:
        """The operand of one direction: the one that is held, or one made of the weights in self.dtype, from the
        workspace when there is one. needs_dx: dgrad will ask for the columnwise one, which the workspace then makes
        from the same read of the weights."""
        if is_held(weights):
            return held_operands(weights, direction)
        takes, by_rows = self.product_takes, self.plans is not None and self.plans["dgrad"].one_kernel

        def make(directions: Collection[Direction], output: Output = takes) -> HybridOperand:
            outputs = dict.fromkeys(directions, output)
            return self.quantize("weight", weight_matrix(weights, self.dtype), **outputs, by_rows=by_rows)

        needs_column = needs_dx or direction == "columnwise"
        if is_gathered(weights) and not torch.compiler.is_compiling():
            return gathered_operand(self, weights, direction, make, needs_column=needs_column)
        if self.workspace is None:
            return getattr(make([direction]), direction)
        forms: dict[Direction, Hashable] = {direction: takes}
        if needs_column:
            forms["columnwise"] = (takes, by_rows)
        kept = {"together": self.exchange is not None, "period": self.context.period}
        return self.workspace.take(weights, forms, self.quantizers.weight, self.key("weight"), make, **kept)

    @torch.no_grad()
    def make_early(self, weights: Weights, direction: Direction) -> None:
        """Make weight() before it is asked for, unless it is made of more than the weights, or is there."""
        if direction in self.early:
            return
        quantizer = self.quantizers.weight
        plain = type(quantizer) is HybridQuantizer and not quantizer.delayed and not self.context.probe
        if not plain or self.workspace is not None or is_held(weights) or is_gathered(weights):
            return
        if weights[0].untyped_storage().nbytes():  # which fully_shard may have freed, and not yet gathered again
            self.early[direction] = self.weight(weights, direction)

    def check_weights(self, weights: Weights, needs_dx: bool, needs_dw: bool) -> None:
        """UserError, with the name of the module, for weights that one of the GEMMs could not use. A step's use of ones
        that are held in fp8_delayed is noted."""
        owners = [self] if len(weights) == 1 and weights[0].dim() == 3 else self.singles
        for call, weight in zip(owners, weights, strict=True):
            try:
                if isinstance(weight, HybridQuantizedTensor):
                    for direction in DIRECTIONS[: 1 + needs_dx]:
                        check_held(weight, direction, self.quantizers.weight)
                if self.main_grad and needs_dw and weight.requires_grad:
                    check_main_grad(weight)
            except UserError as error:
                raise UserError(f"{call.layer}: {error}") from None
        if is_held(weights) and weights[0].quantizer.delayed:
            for states in link_states(weights, self.states):
                replace(states, **self.recording).use()

    def begin_saved_input(
        self, tensors: Sequence[Tensor], skeleton: Skeleton | None, *, early: bool = False
    ) -> Callable[[], AnyOperand]:
        """The columnwise operand of x, made from what was saved of x; what other ranks have of it is on its way while
        other work is done (tokens), and good until ranks begin to exchange other rows. early: it is where forward
        left it, so that it may leave before what was enqueued last (parallel.wire.p2p_copy.begin)."""
        if skeleton is not None:
            return self.begin_whole_input(unflatten(tensors, skeleton), lent=True, early=early)
        outputs = {"columnwise": self.product_takes, "by_rows": self.by_rows("wgrad")}
        arriving = (lambda: tensors[0]) if self.exchange is None else self.exchange.begin_gathered("input", tensors[0])
        return lambda: self.quantize("input", arriving(), **outputs).columnwise

    def begin_whole_input(
        self, column: AnyOperand, *, lent: bool = False, early: bool = False
    ) -> Callable[[], AnyOperand]:
        """A columnwise operand of x, of all tokens where it has this rank's, which are then gathered as
        begin_saved_input() does. lent, early: as in quant.gather.Gathering."""
        if isinstance(column, OperandParts):
            return column.operand
        if self.exchange is None or self.splits is not None or not isinstance(column, Operand):
            return lambda: column  # experts have all tokens, and so does what was made to be multiplied at once
        part = self.exchange.tokens("input", column.shape[1])
        if part is None:
            return lambda: column
        exact = self.product_takes == "exact"
        gathering = Gathering(column, 1, part, lent=lent and exact, early=early)
        return gathering.exact if exact else gathering.whole

    def probe_forward(self, x: Tensor, weights: Weights, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Report the tensors of forward; returns x and the weights in high precision, which backward compares with."""
        self.probe_parts("input", x)
        originals = [call._probe_weight(w) for call, w in zip(self.singles, expert_weights(weights), strict=True)]
        self.probe_gemms("fprop", self.parts(x), originals, self.parts(y))
        return x, originals

    def probe_parts(self, tensor: str, x: Tensor) -> None:
        """Report the rows of each expert that has any."""
        for call, part in zip(self.singles, self.parts(x), strict=True):
            if len(part):
                call.probe_tensor(tensor, part)

    def probe_gemms(self, gemm: str, a: Sequence[Tensor], b: Sequence[Tensor], actual: Sequence[Tensor]) -> None:
        """Report the GEMM of each expert that has rows, of unquantized a [m, k] and b [n, k]; `actual` is summed over
        ranks where each has a part of the products."""
        probe, tensor = self.context.probe, PRODUCTS[gemm]
        for call, left, right, product in zip(self.singles, a, b, actual, strict=True):
            if probe and left.numel():
                site = call.site(gemm, call.part_of(tensor, product))
                probe.gemm(site, left, right, product, partial(call.summed, tensor))

    def _probe_weight(self, weight: Tensor) -> Tensor:
        """The high-precision weight, which is reported. For a weight that is held quantized, this is the probe's
        original of the layer; without an original, the values held stand in for it in the errors of GEMMs, and no error
        of its own is reported."""
        if isinstance(weight, HybridQuantizedTensor):
            original = self.context.probe.originals.get(self.layer)
            if original is None:
                return weight.dequantize(self.dtype)
            weight = original if weight.part is None else own_part(original, weight.part, weight.part.axis)
        weight = weight.to(self.dtype)
        self.probe_tensor("weight", weight)
        return weight
