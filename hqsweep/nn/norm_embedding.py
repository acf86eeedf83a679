"""Modules whose weight is not a GEMM operand: norms and embeddings.

Norm is LayerNorm or RMSNorm in float32, whose gain is rounded by the recipe's `norm` quantizer. An embedding gives rows
of a table by tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hqsweep.errors import UserError
from hqsweep.nn.core.context import use_kernels
from hqsweep.nn.core.module import QuantizedWeight
from hqsweep.nn.core.options import EPSILON
from hqsweep.nn.core.residual import Branch, add_branch, is_observed, whole
from hqsweep.nn.core.wire import DeferredGradient, GradientReader, Summands
from hqsweep.ops import norm
from hqsweep.ops.quantize.fused import Normed, takes_normed
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.ops.vocabulary import embed, embedding_gradient, takes_table
from hqsweep.recipe.argument import RecipeArgument, module_quantizers

NORMALIZATIONS = ("RMSNorm", "LayerNorm")


@dataclass(frozen=True, kw_only=True, eq=False)
class _NormCall:
    """A call of a norm."""

    epsilon: float
    dtype: torch.dtype
    amax: bool = False
    signs: bool | None = None
    of_branch: Summands | None = None
    """The summands of a branch that is a sum over ranks."""
    gradient: DeferredGradient | None = None
    """Where the gradient of the norm may be deferred as summands."""
    copies: Sequence[Tensor] = ()
    """Further tensors that receive the norm."""


class _NormFunction(torch.autograd.Function):
    """Return x + branch, its norm, and the wanted amaxes. x, branch: [..., D]; gain, bias: [D].

    With call.of_branch, branch is this rank's summand. Saved are the sum, which is the residual stream, and one or two
    numbers per row.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, branch: Tensor | None, gain: Tensor, bias: Tensor | None, call: _NormCall
    ) -> tuple[Tensor, ...]:
        others = () if call.of_branch is None else (call.of_branch.received(), call.of_branch.rank)
        run = partial(norm.norm_copied, copies=call.copies) if call.copies else norm.norm
        options = (call.epsilon, call.dtype, call.amax, call.signs)
        h, statistics, *results = run(x, branch, gain, bias, *options, *others)
        total, results = (x, results) if branch is None else (results[0], results[1:])
        ctx.save_for_backward(total, gain, statistics)
        ctx.branch_dtype = branch.dtype if branch is not None and ctx.needs_input_grad[1] else None
        ctx.gradient, ctx.writer = call.gradient, call.of_branch and call.of_branch.writer
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results)
        return total, h, *results

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor | None, dh: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.writer is not None:
            ctx.writer.prepare()
        others = () if ctx.gradient is None else ctx.gradient.take(dh)
        dx, dbranch, *rest = _gradients(ctx, dtotal, dh, *others, writer=ctx.writer)
        if ctx.writer is not None and dbranch is not None:
            ctx.writer.tell(dbranch)
        return dx, dbranch, *rest, None


def _gradients(
    ctx: Any,
    dtotal: Tensor | None,
    dh: Tensor | None,
    received: Tensor | None = None,
    rank: int = 0,
    writer: GradientReader | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, branch, gain and bias.

    The stream's gradient is added in the norm's backward pass; both are rounded to the stream's dtype. received, rank:
    for a dh that ranks sum. writer: of the branch.
    """
    total, gain, statistics = ctx.saved_tensors
    branch_dtype = ctx.branch_dtype
    if dh is None:
        dbranch = None if dtotal is None or branch_dtype is None else in_dtype(dtotal, branch_dtype)
        return dtotal, dbranch, None, None
    apart = branch_dtype if branch_dtype is not total.dtype else None
    place = None if apart is None or writer is None else writer.place(total, apart)
    of_row = (dh, total, dtotal, gain, statistics)
    if place is None:
        dx, dgain, *rest = norm.norm_backward(*of_row, apart, received, rank)
    else:
        dx, dgain, *rest = *norm.norm_backward_to(*of_row, None, received, rank, place=place), place
    dbranch = None if branch_dtype is None else rest[0] if rest else dx
    return dx, dbranch, dgain[0], dgain[1] if len(dgain) == 2 else None


class _NormedFunction(torch.autograd.Function):
    """_NormFunction without the output. It returns x + branch, a placeholder for the output, and the statistics.

    The placeholder has the output's shape and dtype, but is one expanded element that is never read. Its gradient is
    the output's.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, branch: Tensor | None, gain: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics, *summed = norm.norm_statistics(x, branch, gain, bias, epsilon)
        total = x if branch is None else summed[0]
        ctx.save_for_backward(total, gain, statistics)
        ctx.branch_dtype = branch.dtype if branch is not None and ctx.needs_input_grad[1] else None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(statistics)
        return total, statistics.new_empty((), dtype=dtype).expand(total.shape), statistics

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal: Tensor | None, dh: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dtotal, dh), None, None


class Norm(QuantizedWeight):
    """Normalize x [..., D] over the last axis and multiply by the gain [D] (LayerNorm: plus a bias [D]); float32 [...,
    D].

    RMSNorm: x / sqrt(mean(x^2) + epsilon) (Zhang and Sennrich, arXiv 1910.07467). LayerNorm: (x - mean(x)) /
    sqrt(var(x) + epsilon) (Ba et al., arXiv 1607.06450). Role: QuantizerRole("norm", "weight", name). On CUDA, own
    kernels run if quantization(kernels=True) and D is a multiple of 4 up to 6144. They add in another order than torch.
    """

    module_type = "norm"

    def __init__(
        self, dim: int, *, name: str, recipe: RecipeArgument, normalization: str = "RMSNorm", epsilon: float = EPSILON
    ) -> None:
        super().__init__()
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"{name}: normalization is {normalization!r}; allowed: {', '.join(NORMALIZATIONS)}")
        self.name, self.epsilon = name, epsilon
        self.quantizers, _ = module_quantizers(recipe, self.module_type, name)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x, None, torch.float32)[1]

    def added(
        self, x: Tensor, branch: Branch, dtype: torch.dtype = torch.float32, gradient: DeferredGradient | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (x + branch, its norm in `dtype`), in one pass on CUDA. The sum is as in add_branch().

        gradient: the DeferredGradient of the norm's only reader. The norm may then be sent while it is computed.
        """
        if is_observed(self):
            total = add_branch(x, branch)
            return total, in_dtype(self(total), dtype)
        return self._normed(x, branch, dtype, gradient=gradient)[:2]

    def measured(
        self, x: Tensor, branch: Branch, dtype: torch.dtype, amax: bool, signs: bool | None
    ) -> tuple[Tensor, ...]:
        """Return added(), then the wanted amaxes of the output (HybridQuantizer.takes_amaxes), or none."""
        if is_observed(self):
            return self.added(x, branch, dtype)
        return self._normed(x, whole(branch) if amax else branch, dtype, amax, signs)

    def described(self, x: Tensor, branch: Branch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Normed] | None:
        """Return added() with a placeholder for the norm, and its description, for a quantizer that takes_normed().

        None if no kernel takes it, or if the branch is a deferred sum.
        """
        weight = self.quantized_weight()
        if not (branch is None or isinstance(branch, Tensor)):
            return None
        taken = dtype is torch.bfloat16 and norm.takes(x, branch, weight, dtype) and takes_normed(x)
        if is_observed(self) or not (taken and use_kernels(x)):
            return None
        bias = self._own_bias()
        total, h, statistics = _NormedFunction.apply(x, branch, weight, bias, self.epsilon, dtype)
        rows = total.detach().flatten(0, -2)
        return total, h, Normed(rows, weight.detach(), bias, statistics, self.epsilon)

    def _normed(
        self,
        x: Tensor,
        branch: Branch,
        dtype: torch.dtype,
        amax: bool = False,
        signs: bool | None = None,
        gradient: DeferredGradient | None = None,
    ) -> tuple[Tensor, ...]:
        weight, bias = self.quantized_weight(), self._own_bias()
        is_whole = branch is None or isinstance(branch, Tensor)
        summands, own = (None, branch) if is_whole else (branch, branch.own)
        if use_kernels(x) and norm.takes(x, own, weight, dtype):
            wanted = {"amax": amax, "signs": signs} if norm.measures(x, dtype) else {}
            call = _NormCall(epsilon=self.epsilon, dtype=dtype, of_branch=summands, gradient=gradient, **wanted)
            if gradient is None:
                return _NormFunction.apply(x, own, weight, bias, call)
            gradient.is_taken = True
            if summands is not None:
                summands.received()  # receive before sending more
            with gradient.sending(x, dtype) as copies:
                return _NormFunction.apply(x, own, weight, bias, replace(call, copies=copies))
        total = add_branch(x, branch)
        x, shape = input_in(total, torch.float32, self.name), (total.shape[-1],)
        if bias is None:
            h = F.rms_norm(x, shape, weight, self.epsilon)
        else:
            h = F.layer_norm(x, shape, in_dtype(weight, torch.float32), in_dtype(bias, torch.float32), self.epsilon)
        return total, in_dtype(h, dtype)

    def _own_bias(self) -> Tensor | None:
        return None if self.bias is None else self.own(self.bias)

    def reset_parameters(self) -> None:
        """Set the gain to one, the bias to zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def check_tokens(shape: Sequence[int], axis: int, ranks: int, where: str = "") -> None:
    """Raise UserError for tokens [B, T] that ranks do not divide along an axis."""
    if shape[axis] % ranks:
        what = f"a sequence of {shape[1]} tokens" if axis else f"a batch of {shape[0]} sequences"
        raise UserError(f"{where}{what} does not divide by tp={ranks}")


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Return rows [..., D] of a table [V, D] for tokens int64 [...]. On CUDA, own kernels compute the table's
    gradient."""
    if not (use_kernels(table) and takes_table(table, tokens)):
        return F.embedding(tokens, table)
    return _Embedding.apply(tokens, table)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.entries = len(table)
        if torch.compiler.is_compiling():
            return F.embedding(tokens, table)
        return embed(tokens.reshape(-1), table).view(*tokens.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, embedding_gradient(gradient.flatten(0, -2), tokens.reshape(-1), ctx.entries)
