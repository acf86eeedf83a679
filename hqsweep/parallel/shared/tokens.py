"""Tokens split over the ranks of a group, and parameters that every rank has whole, for autograd.

If each rank has some of the tokens, gradients of gains are summed over ranks. A norm that sums its own gain does so
before it passes on the gradient of its input: a collective of a few microseconds in the critical path. Here all gains
pass through one autograd function before the first layer. Its backward, the sum, runs after the first layer's backward.
Every element is the same sum.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hqsweep.parallel.shards.fsdp_state import groups_of
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.wire.local import is_spread
from hqsweep.parallel.wire.tokens import gather_rows, sum_whole


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a DTensor parameter; any other parameter as it is.

    A part with a main_grad is a leaf: autograd gets no gradient of it, and torch 2.11 would make one of zeros. Its
    `spread` is the parameter.
    """
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
    """Returns the tensors themselves. Their gradients are summed over ranks at once."""

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
    """Return the tensors themselves. Backward sums their gradients over ranks, all in one collective.

    Every rank has the part of the gradients that comes from its tokens.
    """
    return _SumGradients.apply(group, *tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitTokens:
    """How tokens are split over the ranks of a group that each compute later results for every token."""

    group: ProcessGroup
    axis: int
    """The axis of x along which each rank has an equal part of the tokens."""

    def whole(self, x: Tensor) -> Tensor:
        """Return x of all ranks' tokens. Each rank has the whole gradient, and takes its own tokens of it."""
        return _WholeTokens.apply(x, self)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's part of an x that is equal on all ranks. Its gradient is gathered."""
        return _OwnTokens.apply(x, self)

    def gathered(self, x: Tensor) -> Tensor:
        """Return x of all ranks."""
        lead, shape = math.prod(x.shape[: self.axis]), list(x.shape)
        shape[self.axis] *= self.group.size()
        return gather_rows(x.flatten(0, self.axis), self.group, lead).view(shape)

    def cut(self, x: Tensor) -> Tensor:
        """Return a copy of this rank's part of x."""
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
    """Return [..., W * C] from [..., C] of each rank. Every rank then computes the same from it."""
    return _WholeFeatures.apply(x, group)


_TOGETHER: dict[int, Tensor] = {}
"""id of a parameter -> the tensor that its module reads instead."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedWeight:
    """How ranks share a module's parameters (hqsweep.nn.core.wire.WeightRanks). It cannot be copied, because a group
    cannot."""

    tokens: ProcessGroup | None = None
    """The ranks that each have some of the tokens. Gradients of parameters are summed over them."""
    part: Part | None = None
    """This rank's part of the weight; None: each rank has all of it."""
    split: int | None = None
    """The axis of tokens [B, T] along which each rank takes its part of an embedding's rows; None: it takes all."""

    def own(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter, as forward reads it."""
        if self.tokens is None:
            return local(parameter)
        together = _TOGETHER.get(id(parameter))
        return sum_gradients([local(parameter)], self.tokens)[0] if together is None else together

    def __deepcopy__(self, memo: Any) -> "SharedWeight":
        return self


@contextmanager
def gains_summed_together(layers: Iterable[nn.Module]) -> Iterator[None]:
    """A context for a forward of the layers. One sum then gives all gains their gradients.

    Layers gathered by fully_shard sum their own gains, since their parameters are other objects within forward.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    modules = [module for layer in layers for module in layer.modules()]
    ranks = {module: getattr(module, "parallel", None) for module in modules}
    norms = [module for module, own in ranks.items() if isinstance(own, SharedWeight) and own.tokens is not None]
    gains = [p for norm in norms for p in norm.parameters(recurse=False) if p.requires_grad]
    if not gains or any(map(groups_of, modules)) or len({ranks[norm].tokens for norm in norms}) > 1:
        yield
        return
    read = sum_gradients(list(map(local, gains)), ranks[norms[0]].tokens)
    _TOGETHER.update(zip(map(id, gains), read, strict=True))
    try:
        yield
    finally:
        for gain in gains:
            _TOGETHER.pop(id(gain), None)
