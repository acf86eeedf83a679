"""GroupedCall: a call of a grouped linear, whose tensors are quantized for all experts and multiplied for all."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import RngKeys
from hqsweep.gemm.grouped import Group, GroupedPlan, Members, grouped_plan, mm_t_tokens, mm_t_weights
from hqsweep.memo import constant_result
from hqsweep.nn.call import slot_name
from hqsweep.nn.delayed import DelayedStates, slots_of
from hqsweep.nn.grouped_parameter import link_group_states
from hqsweep.nn.linear_function import LinearCall
from hqsweep.ops.grouped_layout import Splits
from hqsweep.ops.plan import in_dtype
from hqsweep.ops.request import Output
from hqsweep.quant.grouped_operand import (
    GroupedOperand,
    GroupSkeleton,
    HybridGroup,
    flatten_group,
    has_own_quantize,
    quantize_group,
    unflatten_group,
)
from hqsweep.quant.hybrid import DIRECTIONS, Direction
from hqsweep.quant.operand import flatten, unflatten
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.pairs import GEMMS

Weights = Sequence[Tensor]
"""One tensor for each expert [N, K], or one for all [E, N, K]."""


@dataclass(frozen=True, kw_only=True)
class GroupedCall(LinearCall):
    """What a call of each expert would be, and the splits. Keys and states are those of `experts`."""

    states: Sequence[DelayedStates]
    """Of each expert."""
    splits: Splits
    weight_splits: Splits
    """Of all weights, one below the other."""
    plans: dict[tuple, GroupedPlan]
    """Those that calls with these quantizers have used; the module keeps them."""

    @cached_property
    def experts(self) -> list[LinearCall]:
        """The call of each expert, as a single linear would make it."""
        own = {field.name: getattr(self, field.name) for field in fields(LinearCall)} | {"workspace": None}
        return [LinearCall(**own | {"expert": e, "states": states}) for e, states in enumerate(self.states)]

    def keys(self, tensor: str) -> RngKeys:
        """key() of every expert."""
        slots = _slots(self.module_type, tensor, self.name, len(self.states), self.part(tensor))
        return RngKeys(seed=self.context.seed, slots=slots, step=self.context.step or 0)

    def quantize(
        self,
        tensor: str,
        x: Tensor,
        *,
        rowwise: Output | None = None,
        columnwise: Output | None = None,
        by_rows: bool = False,
    ) -> HybridGroup:
        """x [rows, cols] by the quantizer of its slot, the rows of each expert by themselves. by_rows: exact columns as
        torch._grouped_mm takes them."""
        return self._quantize(tensor, x, self.splits, rowwise=rowwise, columnwise=columnwise, by_rows=by_rows)

    def _quantize(self, tensor: str, x: Tensor, splits: Splits, **wanted: Any) -> HybridGroup:
        quantizer = self.quantizer(tensor)
        keys = states = None
        if quantizer.stochastic or has_own_quantize(quantizer):
            keys = self.keys(tensor)
        if quantizer.delayed:
            states = slots_of(self.states, tensor, quantizer, device=x.device, **self.recording)
        try:
            return quantize_group(x, splits, quantizer, **wanted, keys=keys, states=states)
        except UserError as error:
            raise UserError(f"{self.name}: {tensor} of {error}") from None

    def weight(self, weights: Weights | Group, direction: Direction, dgrad: GroupedPlan | None) -> Group:
        """The operands of one direction: those that are held, or ones made of the weights in self.dtype. dgrad: how the
        product that reads columns is computed, if it is or will be; see LinearCall.weight."""
        if not isinstance(weights, Sequence):
            return weights
        if isinstance(weights[0], HybridQuantizedTensor):
            held = [getattr(weight, direction) for weight in weights]
            return held[0] if isinstance(held[0], GroupedOperand) else Members(members=held)
        by_rows = dgrad is not None and dgrad.grouped

        def make(directions: Collection[Direction]) -> HybridGroup:
            wanted = dict.fromkeys(DIRECTIONS) | dict.fromkeys(directions, self.product_takes)
            return self._quantize("weight", _matrix(weights, self.dtype), self.weight_splits, **wanted, by_rows=by_rows)

        if self.workspace is None:
            return getattr(make([direction]), direction)
        forms: dict[Direction, Hashable] = {direction: self.product_takes}
        if dgrad is not None:
            forms["columnwise"] = (self.product_takes, by_rows)
        return self.workspace.take(weights, forms, self.quantizers.weight, self.key("weight"), make)

    def check_weights(self, weights: Weights, needs_dx: bool, needs_dw: bool) -> None:
        """UserError, with the name of the module, for weights that one of the GEMMs could not use."""
        if not self.main_grad and not any(isinstance(weight, HybridQuantizedTensor) for weight in weights):
            return
        for expert, weight in zip(self._calls(weights), weights, strict=True):
            expert.check_weight(weight, needs_dx, needs_dw and weight.requires_grad)

    def use_held(self, weights: Weights) -> None:
        """Note that this step uses weights that are held quantized in fp8_delayed."""
        if not (isinstance(weights[0], HybridQuantizedTensor) and weights[0].quantizer.delayed):
            return
        link_group_states(weights, self.states)
        for expert, weight in zip(self.experts, expert_weights(weights), strict=True):
            expert.use_held(weight)

    def _calls(self, weights: Weights) -> Sequence[LinearCall]:
        """Of each weight: of its expert, or of the module for one that is all of them."""
        return [self] if weights[0].dim() == 3 else self.experts

    def plan(self, gemm: str, sizes: tuple[int, int], device: torch.device, out_dtype: torch.dtype) -> GroupedPlan:
        """How "fprop", "dgrad" or "wgrad" is computed; sizes: in and out features."""
        host, equal = self.splits.sizes is not None, self.splits.equal > 0
        known = (gemm, sizes, device, out_dtype, host, equal)
        found = self.plans.get(known)
        if found is None:
            a, b = (getattr(self.quantizer(tensor), direction) for tensor, direction in GEMMS[gemm])
            facts = {"gemm_mode": self.gemm, "out_dtype": out_dtype, "sizes": sizes}
            facts |= {"host_splits": host, "equal_splits": equal}
            found = self.plans[known] = grouped_plan(a, b, device, gemm=gemm, **facts)
        return found

    def tokens(self, a: Group, b: Group, how: GroupedPlan) -> Tensor:
        """fprop and dgrad. UserError, with the module's name, for what gemm=native has no product for."""
        try:
            return mm_t_tokens(a, b, how, out_dtype=self.dtype)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def weight_gradients(self, a: Group, b: Group, how: GroupedPlan, out_dtype: torch.dtype) -> Sequence[Tensor]:
        """wgrad, for each expert; raises as tokens does."""
        try:
            return mm_t_weights(a, b, how, out_dtype=out_dtype)
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None

    def saved_input(self, tensors: Sequence[Tensor], skeleton: GroupSkeleton | None, how: GroupedPlan) -> Group:
        """The columnwise operands of x, from what was saved of it."""
        if skeleton is None:
            made = self.quantize("input", tensors[0], columnwise=self.product_takes, by_rows=how.grouped)
            return made.columnwise
        return unflatten_group(tensors, skeleton)

    def parts(self, x: Tensor) -> list[Tensor]:
        """The rows of each expert."""
        return [x[start:end] for start, end in self.splits.spans]


def expert_weights(weights: Weights) -> list[Tensor]:
    """The weight of each expert [N, K], as views."""
    return list(weights[0].unbind(0)) if weights[0].dim() == 3 else list(weights)


def flatten_weights(weights: Weights) -> tuple[list[Tensor], list]:
    """What dgrad needs of the weights: themselves, or the tensors of their columnwise operands."""
    if not isinstance(weights[0], HybridQuantizedTensor):
        return list(weights), []
    skeletons, tensors = [], []
    for weight in weights:
        held = weight.columnwise
        own, skeleton = flatten_group(held) if isinstance(held, GroupedOperand) else flatten(held)
        tensors += own
        skeletons.append(skeleton)
    return tensors, skeletons


def unflatten_weights(tensors: Sequence[Tensor], skeletons: list) -> Weights | Group:
    """Inverse of flatten_weights."""
    if not skeletons:
        return tensors
    if isinstance(skeletons[0], GroupSkeleton):
        return unflatten_group(tensors, skeletons[0])
    count = len(tensors) // len(skeletons)
    parts = [tensors[i * count : (i + 1) * count] for i in range(len(skeletons))]
    return Members(members=[unflatten(part, skeleton) for part, skeleton in zip(parts, skeletons, strict=True)])


_SLOTS: dict[tuple, tuple[str, ...]] = {}
_KEPT_SLOTS = 4096


@constant_result
def _slots(module_type: str, tensor: str, name: str, experts: int, part: int) -> tuple[str, ...]:
    """slot_name of every expert. Kept."""
    facts = (module_type, tensor, name, experts, part)
    found = _SLOTS.get(facts)
    if found is None:
        if len(_SLOTS) >= _KEPT_SLOTS:
            _SLOTS.clear()
        found = _SLOTS[facts] = tuple(slot_name(module_type, tensor, name, e, part) for e in range(experts))
    return found


def _matrix(weights: Weights, dtype: torch.dtype) -> Tensor:
    """All weights, one below the other, in dtype."""
    if len(weights) == 1 and weights[0].dim() == 3:
        return in_dtype(weights[0], dtype).flatten(0, 1)
    (rows, width), first = weights[0].shape, weights[0]
    made = torch.empty(len(weights) * rows, width, dtype=dtype, device=first.device)
    torch._foreach_copy_(made.split(rows), list(weights))
    return made
