"""TensorParallel: how the ranks of a group share a linear, and what a call of it exchanges.

column: a rank has rows of W [N, K], and makes columns of y of the whole x; the gradients of x are summed over ranks.
row: a rank has columns of W and of x; the products are summed over ranks to y, and dy is whole. With a sequence axis
the whole x, or y, lies split along its tokens: it is gathered, and what is summed is left split (Korthikanti et al.,
arXiv 2205.05198).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError
from hqsweep.parallel.shards.shard_part import CUTS, Mode, Part
from hqsweep.parallel.wire import p2p_copy
from hqsweep.parallel.wire.local import is_spread
from hqsweep.parallel.wire.tokens import (
    Pending,
    begin_gather_rows,
    begin_lent_rows,
    begin_sum_rows,
    gather_rows,
    sum_whole,
)

TOKENS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"column": ("input", "grad_input"), "row": ("grad_output", "output")}
)
"""Mode -> the tensor that is gathered, and the one that is summed, where tokens lie split over ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallel:
    """How the ranks of a group share a module."""

    group: ProcessGroup
    mode: Mode
    sequence: int | None = None
    """The axis of x, or of y, along which tokens lie split over ranks; None: every rank has them all."""
    pieces: int = 1
    """Matrices that lie one below the other in the weight, each of which is cut for itself, as q, k and v."""
    sums: bool = True
    """Whether ranks sum what each has a part of the sums of; else it is left to the caller."""

    def part_of(self, tensor: str) -> Part | None:
        """Where a rank's part of a tensor lies that is cut along its features; None: it has all features."""
        axis = CUTS[self.mode].get(tensor)
        return None if axis is None else Part(group=self.group, axis=axis, runs=self.pieces)

    def exchange(self, shape: Sequence[int]) -> "Exchange":
        """The exchange of a call with an input [*shape, K]."""
        lead, ranks = 1 if self.sequence is None else math.prod(shape[: self.sequence]), self.group.size()
        if self.mode == "row" and self.sequence is not None and shape[self.sequence] % ranks:
            raise UserError(f"{shape[self.sequence]} tokens, along axis {self.sequence}, do not divide by tp={ranks}")
        rows = math.prod(shape)
        return Exchange(parallel=self, lead=lead, rows=rows if self.mode == "column" else rows // ranks)

    def __deepcopy__(self, memo: Any) -> "TensorParallel":
        return self  # a group has no copies


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """What ranks exchange in one call."""

    parallel: TensorParallel
    lead: int
    """The number of sequences whose tokens lie split, one after the other."""
    rows: int
    """The number of this rank's tokens, where they lie split."""
    parts: Mapping[str, Part] = field(init=False)
    """Tensor -> where the parts lie that ranks have of it; a tensor that is not named is whole."""

    def __post_init__(self) -> None:
        own = self.parallel
        cuts = {tensor: own.part_of(tensor) for tensor in CUTS[own.mode]}
        if own.sequence is not None:
            cuts[TOKENS[own.mode][1]] = Part(group=own.group, axis=0, runs=self.lead)
        object.__setattr__(self, "parts", cuts)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The leading axes of y, of an x with these."""
        own, shape = self.parallel, list(shape)
        if own.sequence is not None:
            ranks, length = own.group.size(), shape[own.sequence]
            shape[own.sequence] = length * ranks if own.mode == "column" else length // ranks
        return shape

    def tokens(self, tensor: str, rows: int) -> Part | None:
        """Where this rank's rows of the tensor lie, if they are some of its tokens; None if they are all."""
        own = self.parallel
        if own.sequence is None or tensor != TOKENS[own.mode][0] or own.group.size() == 1 or rows != self.rows:
            return None
        return Part(group=own.group, axis=0, runs=self.lead)

    def splits_tokens(self, tensor: str) -> bool:
        """Whether the tensor is summed over ranks, each of which keeps its tokens of the sum."""
        return self.parallel.sequence is not None and tensor == TOKENS[self.parallel.mode][1]

    def gathered(self, tensor: str, x: Tensor) -> Tensor:
        """x [rows, C] of all ranks, where this tensor lies split along its tokens; else x itself."""
        return self.begin_gathered(tensor, x)()

    def begin_gathered(self, tensor: str, x: Tensor) -> Pending:
        """gathered(), begun (parallel.wire.tokens)."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_gather_rows(x, part.group, part.runs)

    def begin_lent(self, tensor: str, x: Tensor) -> Pending:
        """begin_gathered(), good until ranks of the group begin to exchange other rows."""
        part = self.tokens(tensor, len(x))
        return (lambda: x) if part is None else begin_lent_rows(x, part.group, part.runs)

    def all_read(self, x: Tensor) -> None:
        """Say that all that other ranks sent to x's device has been read (parallel.wire.p2p_copy.all_read)."""
        if x.is_cuda:
            p2p_copy.all_read(self.parallel.group, x.device)

    def begin_summed(self, tensor: str, x: Tensor) -> Pending:
        """The sum over ranks of x where each has a part of its products, or this rank's tokens of the sum; x itself
        where every rank has whole products. It is begun where each rank keeps its tokens (parallel.wire.tokens)."""
        own = self.parallel
        if self.splits_tokens(tensor):
            return begin_sum_rows(x, own.group, self.lead)
        whole = sum_whole(x, own.group) if own.sums and tensor == TOKENS[own.mode][1] else x
        return lambda: whole


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that is a DTensor; any other parameter as it is. A part with a main_grad is a
    leaf, since autograd gets no gradient of it: torch 2.11 would make one of zeros. Its `spread` is the parameter."""
    if not is_spread(parameter):
        return parameter
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return parameter.to_local()
    part = parameter.to_local().detach().requires_grad_(parameter.requires_grad)
    part.main_grad = main_grad.to_local() if hasattr(main_grad, "to_local") else main_grad
    part.spread = parameter
    return part


class _SumGradients(torch.autograd.Function):
    """Tensors themselves; their gradients are summed over ranks at once."""

    @staticmethod
    def forward(ctx, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None, *gradients
        total = sum_whole(torch.cat([gradient.flatten() for gradient in present]), ctx.group)
        sums = iter(total.split([gradient.numel() for gradient in present]))
        return None, *(None if g is None else next(sums).view(g.shape).to(g.dtype) for g in gradients)


def sum_gradients(tensors: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """The tensors themselves. Every rank has the part of their gradients that comes from its tokens, and receives the
    sums, of all in one collective."""
    return _SumGradients.apply(group, *tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitTokens:
    """How tokens lie split over the ranks of a group, where each rank computes all that follows with every token."""

    group: ProcessGroup
    axis: int
    """The axis of x along which each rank has an equal part of the tokens."""

    def whole(self, x: Tensor) -> Tensor:
        """x of all ranks' tokens. Each rank has the whole gradient, and takes that of its own."""
        return _WholeTokens.apply(x, self)

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of an x that all ranks have alike. Its gradient is gathered."""
        return _OwnTokens.apply(x, self)

    def gathered(self, x: Tensor) -> Tensor:
        """x of all ranks."""
        lead, shape = math.prod(x.shape[: self.axis]), list(x.shape)
        shape[self.axis] *= self.group.size()
        return gather_rows(x.flatten(0, self.axis), self.group, lead).view(shape)

    def cut(self, x: Tensor) -> Tensor:
        """A copy of this rank's part of x."""
        return x.chunk(self.group.size(), self.axis)[self.group.rank()].clone(memory_format=torch.contiguous_format)

    def __deepcopy__(self, memo: Any) -> "SplitTokens":
        return self  # a group has no copies


class _WholeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: SplitTokens) -> Tensor:
        ctx.tokens = tokens
        return tokens.gathered(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.cut(gradient), None


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: SplitTokens) -> Tensor:
        ctx.tokens = tokens
        return tokens.cut(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tokens.gathered(gradient), None


class _WholeFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        rows = x.reshape(-1, x.shape[-1])
        parts = gather_rows(rows, group).unflatten(0, (group.size(), -1))
        return parts.transpose(0, 1).flatten(1).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def whole_features(x: Tensor, group: ProcessGroup) -> Tensor:
    """[..., C] of each rank -> [..., W * C], of which every rank then computes the same."""
    return _WholeFeatures.apply(x, group)
