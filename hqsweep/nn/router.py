"""Router: chooses the experts of each token, in float32, and sorts tokens by expert.

All sums here have one order on every device. Tokens are gathered by a permutation, and results are sums over the k
copies of a token. No two threads add to one place.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hqsweep.memo import cached_property
from hqsweep.nn.core.context import use_kernels
from hqsweep.nn.core.wire import WeightRanks
from hqsweep.ops.experts import (
    combine_rows,
    combine_rows_backward,
    dispatch_rows,
    route,
    route_backward,
    routes,
    sum_rows,
    takes,
)
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.ops.splits import PaddedSplits, Splits

ROUTER_STD = 0.02
"""Standard deviation of the initial weights: small, so that a training starts with nearly equal loads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """How M tokens go to k of E experts each."""

    chosen: Tensor
    """int64 [M, k]: experts, the most probable first."""
    weights: Tensor
    """float32 [M, k]: probabilities of these, divided by their sum."""
    tokens: Tensor
    """int64 [E]: the number of choices, among M * k, of each expert."""
    balance: Tensor
    """float32 []: E * sum over e of f_e * P_e; 1 where all experts are equal.

    f_e is the share of expert e in all choices, without a gradient; P_e is its mean probability. Source: Switch
    Transformers, arXiv 2101.03961, equations 4 to 6; for k choices GShard, arXiv 2006.16668.
    """
    placed: tuple[Tensor, Tensor] | None = None
    """`order` and `inverse`, if known."""

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        if self.placed is not None:
            return self.placed
        order = torch.argsort(self.chosen.flatten(), stable=True)
        return order, torch.argsort(order, stable=True)

    @property
    def order(self) -> Tensor:
        """int64 [M * k]: the choices (token * k + rank), sorted by expert, then by token."""
        return self._places[0]

    @property
    def inverse(self) -> Tensor:
        """int64 [M * k]: the place of each choice in `order`."""
        return self._places[1]

    def dispatch(self, x: Tensor, dtype: torch.dtype | None = None, splits: Splits | None = None) -> Tensor:
        """Return [M * k, D] in dtype, or in x's, for x [M, D]: a row for each choice, sorted by expert.

        splits: padded splits, which differ from `tokens`. Zero rows then lie between the experts.
        """
        dtype = dtype or x.dtype
        if moves_by_kernels(x, dtype):
            return _DispatchRows.apply(x, self._places_in(splits), self.chosen.shape[1], *_filled(splits))
        return _Dispatch.apply(in_dtype(x, dtype), self.order, self.inverse, self.chosen.shape[1])

    def combine(self, y: Tensor, added: Tensor | None = None, splits: Splits | None = None) -> Tensor:
        """Return float32 [M, D] for y [M * k, D] in the order of dispatch, plus added [M, D].

        A token's result is the sum of weight * row over its experts, the most probable first. splits: as in
        dispatch.
        """
        if moves_by_kernels(y, y.dtype):
            within = added if added is not None and added.dtype is y.dtype else None
            total = _CombineRows.apply(y, self.weights, within, self._places_in(splits), _filled(splits)[0])
            return total if added is within else total + added.float()
        rows = _Permute.apply(y, self.inverse, self.order).view(*self.weights.shape, y.shape[1])
        total = (rows.float() * self.weights.unsqueeze(-1)).sum(dim=1)
        return total if added is None else total + added.float()

    def _places_in(self, splits: Splits | None) -> Tensor:
        """Return the place of each choice in rows that may be padded; `inverse` without padding."""
        if not isinstance(splits, PaddedSplits):
            return self.inverse
        return self.inverse + (splits.starts[1] - splits.starts[0])[self.chosen.flatten()]


def _filled(splits: Splits | None) -> tuple[Tensor | None, int]:
    """Return the beginnings of padded experts, and the number of rows; (None, 0) without padding."""
    return (splits.starts, splits.rows) if isinstance(splits, PaddedSplits) else (None, 0)


def moves_by_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether kernels dispatch x as rows of dtype, and combine these rows. The kernels also pad experts."""
    return takes(x, dtype) and use_kernels(x)


class Router(nn.Module):
    """x [M, D] -> Routing: softmax over x @ weight [E, D].T in float32, then the k largest. Ties go to the lower index.

    No recipe quantizes it: a rounding error that sends a token to other experts would change the model.
    """

    parallel: WeightRanks | None = None
    """How ranks share the weight; None: this rank has all of it."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(experts, dim), std=ROUTER_STD))

    def forward(self, x: Tensor) -> Routing:
        weight = self.weight if self.parallel is None else self.parallel.own(self.weight)
        logits = _Logits.apply(x.float(), weight.float())
        if use_kernels(logits) and routes(logits, self.top_k):
            weights, balance, chosen, order, places, tokens = _Route.apply(logits, self.top_k)
            return Routing(chosen=chosen, weights=weights, tokens=tokens, balance=balance, placed=(order, places))
        probabilities = F.softmax(logits, dim=-1)
        order = torch.sort(probabilities.detach(), dim=-1, descending=True, stable=True).indices
        chosen = order[:, : self.top_k].contiguous()
        hits = chosen.unsqueeze(-1) == torch.arange(self.experts, device=x.device)
        top = (probabilities.unsqueeze(1) * hits).sum(dim=-1)
        tokens = hits.sum(dim=(0, 1))
        share = tokens.float() / chosen.numel()
        balance = self.experts * (share * probabilities.mean(dim=0)).sum()
        return Routing(chosen=chosen, weights=top / top.sum(dim=-1, keepdim=True), tokens=tokens, balance=balance)


class _Logits(torch.autograd.Function):
    """x [M, D] @ weight [E, D].T in float32, in forward and backward, also inside torch.autocast."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            return dy @ weight, dy.t() @ x


class _Route(torch.autograd.Function):
    """The Router after the logits, forward and backward, in one or two launches. balance and weights have gradients."""

    @staticmethod
    def forward(ctx, logits: Tensor, top_k: int) -> tuple[Tensor, ...]:
        probabilities, chosen, weights, balance, order, places, tokens = route(logits, top_k)
        ctx.save_for_backward(probabilities, chosen, weights, tokens)
        ctx.mark_non_differentiable(chosen, order, places, tokens)
        ctx.set_materialize_grads(False)
        return weights, balance, chosen, order, places, tokens

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights: Tensor | None, dbalance: Tensor | None, *_: None) -> tuple[Tensor, None]:
        return route_backward(*ctx.saved_tensors, dweights, dbalance), None


class _Dispatch(torch.autograd.Function):
    """Gather rows, each k times; backward sums the k gradients of a row."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = (len(x), choices, x.shape[1])
        return x[order // choices]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse].view(ctx.shape).sum(dim=1, dtype=torch.float32).to(dy.dtype), None, None, None


class _Permute(torch.autograd.Function):
    """Gather rows by a permutation; backward gathers by its inverse."""

    @staticmethod
    def forward(ctx, y: Tensor, permutation: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return y[permutation]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse], None, None


class _DispatchRows(torch.autograd.Function):
    """_Dispatch in one pass each way, with the rounding to bfloat16 before it and the padding after it."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, choices: int, starts: Tensor | None, count: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.choices, ctx.dtype = choices, x.dtype
        return dispatch_rows(x, places, choices, starts, count)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(dy, *ctx.saved_tensors, ctx.choices, ctx.dtype), None, None, None, None


class _CombineRows(torch.autograd.Function):
    """The weighted sum of combine in one pass each way. Rows are saved unchanged."""

    @staticmethod
    def forward(ctx, y: Tensor, weights: Tensor, added: Tensor | None, places: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, places, weights, starts)
        ctx.added = added is not None
        return combine_rows(y, places, weights, added)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, starts = ctx.saved_tensors
        dy, dweights, *dadded = combine_rows_backward(dy, *saved, ctx.added, starts)
        return dy, dweights, *(dadded or [None]), None, None
