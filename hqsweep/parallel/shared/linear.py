"""TensorParallel: what a linear has of the ranks that share it: alone, in an MLP, and as a head with its loss.

SharedMLPFunction runs MLPFunction in an order that hides what ranks exchange. Each rank quantizes its part of the
activation, and of its gradient, alone. SharedChunks are the chunks of linear_cross_entropy where ranks share the
vocabulary, or have some of the tokens each. They send each other four numbers a row (ops.vocabulary.loss_parts).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.nn.core.call import NOTHING, KnownInput
from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.guards import once_differentiable, outside_autocast
from hqsweep.nn.core.parameter import AnyOperand, link_states
from hqsweep.nn.core.residual import Branch, is_observed
from hqsweep.nn.layernorm_linears import LayerNormLinear
from hqsweep.nn.linear_loss import Chunks, Input, as_taken, check_head, forms_loss, product_cross_entropy
from hqsweep.nn.linears import Gradient, Linear, as_rows, check_weights, input_column, keep
from hqsweep.ops.elementwise import INPUTS
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.ops.quantize.request import Output
from hqsweep.ops.vocabulary import joint_cross_entropy_, loss_parts, shared_cross_entropy_
from hqsweep.parallel.shards.shard_part import is_alone
from hqsweep.parallel.shared.attention import attend_in_turn
from hqsweep.parallel.shared.call import LinearShare, RankRows, SharedCall
from hqsweep.parallel.shared.linear_function import (
    Handover,
    NormedPart,
    SharedLinearFunction,
    begin_input,
    handover_of,
    one_wgrad,
    stays,
)
from hqsweep.parallel.shared.overlap import LeftGradient, LeftOutput, Turns, activated_in_turn
from hqsweep.parallel.shared.overlapped_gemm import LayerWeights, Outgoing, Prefetched, quantize_tokens, start_values
from hqsweep.parallel.shared.tokens import local
from hqsweep.parallel.shared.vocabulary import cross_entropy, meeting, vocabulary_group
from hqsweep.parallel.wire.local import local as stored
from hqsweep.parallel.wire.tokens import KeptRows, Pending, begin_kept_rows, gather_rows
from hqsweep.quant.operand import HybridOperand


@dataclass(kw_only=True, eq=False)
class TensorParallel(LinearShare):
    """How the ranks of a group share a linear, and compute with it (hqsweep.nn.core.wire.LinearRanks)."""

    layer: LayerWeights | None = None
    """The weights of the running call of the layer, if they are prefetched."""

    def call(self, linear: Linear, shape: Sequence[int]) -> SharedCall:
        """Return a call with an input [*shape, K]."""
        call = SharedCall(**linear.linear_facts(), exchange=self.exchange(shape))
        link_states([stored(linear.weight)], linear.states)  # and not a view of the part
        return call

    def prefetched(self, linear: Linear) -> Prefetched:
        """Return the prefetched operands of the linear's weight, once."""
        return Prefetched() if self.layer is None else self.layer.take(linear)

    def product(self, linear: Linear, x: Tensor, known: KnownInput) -> Tensor:
        return self._product(x, linear, handover_of(known, self.layer))

    def branch(self, linear: Linear, x: Tensor, turns: Turns | None = None) -> Branch:
        """Return product() for a norm that reads it next: Summands if it is a sum of rows over ranks.

        turns: the writer of x, if left_of() gives a LeftOutput and part_in_turn() allows it.
        """
        left = self.left_of(linear, x)
        if left is None:
            return linear(x)
        handover = handover_of(NOTHING, self.layer)
        handover.left, handover.turns, handover.early = left, turns, self.prefetched(linear)
        return left.take(self._product(x, linear, handover))

    def left_of(self, linear: Linear, x: Tensor) -> LeftOutput | None:
        """Return where a call defers the sum of its output over ranks.

        None if the output is more than a sum, or has other readers than the caller.
        """
        plain = type(linear).forward is Linear.forward and linear.bias is None and not is_observed(linear)
        if not (plain and self.sequence is not None and use_kernels(x)) or torch.compiler.is_compiling():
            return None
        return None if current().probe or linear.active_quantizers().output is not None else LeftOutput()

    @outside_autocast
    def _product(self, x: Tensor, linear: Linear, handover: Handover) -> Tensor:
        shape = x.shape[:-1]
        call = self.call(linear, shape)
        weight, ticket = (local(linear.weight), None) if handover.gradient is None else handover.gradient.ticket()
        biases = () if linear.bias is None else (local(linear.bias),)
        rows = input_in(as_rows(x), call.dtype, call.name)
        y = SharedLinearFunction.apply(rows, call, handover, 1, ticket, weight, *biases)
        y = call.rounded("output", y)
        return y if x.dim() == 2 else y.view(*call.exchange.shape(shape), y.shape[-1])

    def normed(self, linear: LayerNormLinear, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor, KnownInput]:
        call, early, weight = self.call(linear, x.shape[:-1]), self.prefetched(linear), local(linear.weight)
        early.make(call, [weight], "rowwise")  # before the branch's sum over ranks is waited for
        part = call.exchange.tokens("input", x.shape[:-1].numel())
        gradient = LeftGradient(linear.name, partial(start_values, call.quantizers.input, part, len(weight)))
        gradient.before_norm(weight)
        added = linear.norm.added(x, branch, linear.dtype, gradient)
        return *added, NormedPart(early=early, gradient=gradient if gradient.is_taken else None)

    def prefetch(self, linear: Linear, shape: Sequence[int]) -> AnyOperand | None:
        """Return the rowwise operand of the weight for a call with an input [*shape, K], before its use.

        None if the operand needs more than the weight, or a hook observes the call.
        """
        if is_observed(linear):
            return None
        early = Prefetched()
        early.make(self.call(linear, shape), [local(linear.weight)], "rowwise")
        return early.take("rowwise")

    def layer_call(self, layer: nn.Module, shape: Sequence[int]) -> AbstractContextManager:
        """Return a context for a call of a transformer layer with x [*shape, D]; this linear makes q, k and v.

        Inside, operands of later weights are made while the layer waits for other ranks.
        """
        qkv, proj, fc1, fc2 = layer.attn.qkv, layer.attn.proj, layer.mlp.fc1, layer.mlp.fc2
        if torch.compiler.is_compiling():
            return nullcontext()
        whole = self.exchange(shape).shape(shape)
        shapes = {proj: whole, fc1: shape, fc2: whole}
        linears = [linear for linear in (qkv, *shapes) if isinstance(linear.parallel, TensorParallel)]
        makers = {
            linear: partial(linear.parallel.prefetch, linear, shapes[linear]) for linear in linears if linear is not qkv
        }
        return LayerWeights(makers).lent(*linears)

    def joins(self, fc1: Linear, fc2: Linear, kind: str, x: Tensor) -> bool:
        return parts_are_alone(fc1, fc2, kind, x)

    def mlp(self, fc1: Linear, x: Tensor, fc2: Linear, kind: str, known: KnownInput) -> Branch:
        of_second, left = fc2.parallel, fc2.parallel.left_of(fc2, x)
        first = self.call(fc1, x.shape[:-1])
        second = of_second.call(fc2, first.exchange.shape(x.shape[:-1]))
        handover = handover_of(known, self.layer)
        w1, ticket = (local(fc1.weight), None) if handover.gradient is None else handover.gradient.ticket()
        next_handover = Handover(left=left, early=of_second.prefetched(fc2), layer=self.layer)
        calls = {"first": first, "second": second, "first_handover": handover, "second_handover": next_handover}
        rows = input_in(as_rows(x), fc1.dtype, fc1.name)
        y = SharedMLPFunction.apply(rows, MLPCall(**calls, kind=kind), ticket, w1, local(fc2.weight))
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        return y if left is None else left.take(y)

    def cross_entropy(self, head: Linear, h: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
        if chunk is None and not forms_loss(head, h):
            return cross_entropy(head(h), targets, vocabulary_group(head))
        if self.mode == "row":
            raise UserError(f"{head.name}: a linear whose logits are sums over ranks takes no chunks")
        call = self.call(head, h.shape[:-1])
        check_head(head, call)
        return product_cross_entropy(call, h, local(head.weight), targets, chunk, SharedChunks)

    def attend(self, proj: Linear, qkv: Tensor, heads: int, base: float | None, causal: bool) -> Branch:
        turned = None if self.left_of(proj, qkv) is None else attend_in_turn(qkv, heads, base, causal, proj)
        return None if turned is None else self.branch(proj, *turned)


@dataclass(frozen=True, kw_only=True, eq=False)
class MLPCall:
    """The calls of fc1 and fc2, and the Handover of each. They have no probe and no boundaries."""

    first: SharedCall
    second: SharedCall
    first_handover: Handover
    second_handover: Handover
    kind: str
    """The activation."""

    @property
    def name(self) -> str:
        """The name of fc1."""
        return self.first.name


class SharedMLPFunction(torch.autograd.Function):
    """x [M, D], w1 [inputs * F, D], w2 [D, F] -> fc2(activation(fc1(x))) [M, D], with F shared over ranks.

    Ranks may also share the tokens of x and of the output. With a ticket the gradient of w1 comes late.
    """

    @staticmethod
    def forward(ctx, x: Tensor, call: MLPCall, ticket: Tensor | None, w1: Tensor, w2: Tensor) -> Tensor:
        first, second, of_first, of_second = call.first, call.second, call.first_handover, call.second_handover
        needs_dx, *_, needs_dw1, needs_dw2 = (needed and first.grad for needed in ctx.needs_input_grad)
        needs_dz = needs_dx or needs_dw1
        check_weights(first, (w1,), needs_dx, needs_dw1)
        operands = of_first.quantize_input(first, x, input_column(first, needs_dw1))
        z = of_first.fprop(first, (w1,), operands.rowwise, needs_dx)
        saved1, ctx.first = keep(first, (w1,), x if needs_dw1 else None, operands.columnwise, needs_dx)
        del operands  # an exact matrix, perhaps
        check_weights(second, (w2,), needs_dz, needs_dw2)
        column = input_column(second, needs_dw2)
        operands = activated_in_turn(second, z, call.kind, rowwise=second.product_takes, columnwise=column)
        y = of_second.fprop(second, (w2,), operands.rowwise, needs_dz)
        saved2, ctx.second = keep(second, (w2,), None, operands.columnwise, needs_dz)
        also = [partial(of_first.early.make, first, (w1,), "columnwise")] if needs_dx else []
        if of_first.layer is not None:
            of_first.layer = None
        of_second.send_gradient(second, (w2,), rowwise=needs_dz, columnwise=needs_dw2, also=also)
        ctx.call, ctx.count, ctx.stays = call, len(saved1), (stays(first), stays(second))
        ctx.save_for_backward(*saved1, *saved2, *([z] if needs_dz else []))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Gradient, ...]:
        call, tensors = ctx.call, ctx.saved_tensors
        first, second, of_first, of_second = call.first, call.second, call.first_handover, call.second_handover
        needs_dx, _, is_late, needs_dw1, needs_dw2 = ctx.needs_input_grad
        needs_dz, saved = needs_dx or needs_dw1, tensors[ctx.count :]
        dx = dticket = dw1 = dw2 = None
        takes = second.product_takes
        row, column = (takes if needs_dz else None), (takes if needs_dw2 else None)
        dy = in_dtype(dy, second.dtype)
        h_column = begin_input(ctx.second, saved, early=ctx.stays[1]) if needs_dw2 else None
        if needs_dw2 and of_second.left is not None:
            h_column = _ready(h_column())  # while dy is still on its way
        operands = of_second.quantize_gradient(second, dy, rowwise=row, columnwise=column)
        if needs_dz:
            dh = of_second.begin_dgrad(ctx.second, saved, operands.rowwise)()
        if needs_dw2:
            dw2 = one_wgrad(ctx.second, operands.columnwise, h_column)
            del h_column
        if not needs_dz:
            return None, None, None, None, dw2
        takes = first.product_takes
        row, column = (takes if needs_dx else None), (takes if needs_dw1 else None)
        is_late = is_late and needs_dx and needs_dw1
        x_column = begin_input(ctx.first, tensors, early=ctx.stays[0]) if needs_dw1 else None  # beside what follows
        operands = first.quantize_activated("grad_output", tensors[-1], dh, call.kind, rowwise=row, columnwise=column)
        if needs_dx:  # and is summed beside a part of it, or beside wgrad
            dx_sum = of_first.begin_dgrad(ctx.first, tensors, operands.rowwise)
        if is_late:
            of_first.gradient.late = partial(one_wgrad, ctx.first, operands.columnwise, x_column)
            dticket = dy.new_empty(0)
        elif needs_dw1:
            dw1 = one_wgrad(ctx.first, operands.columnwise, x_column)
        if needs_dx:
            dx = of_first.gradient_of(first, dx_sum)
        return dx, None, dticket, dw1, dw2


def _ready(operand: AnyOperand) -> Callable[[], AnyOperand]:
    return lambda: operand


def parts_are_alone(fc1: Linear, fc2: Linear, kind: str, x: Tensor) -> bool:
    """Return whether a rank quantizes its part of the activation, and of its gradient [tokens, features], alone."""
    features, width = local(fc1.weight).shape[0], local(fc2.weight).shape[1]
    if features % (8 * INPUTS[kind]) or (fc1.parallel.mode, fc2.parallel.mode) != ("column", "row"):
        return False
    first = fc1.parallel.exchange(x.shape[:-1])
    shape = first.shape(x.shape[:-1])
    rows, second = math.prod(shape), fc2.parallel.exchange(shape)
    of_input, of_gradient = fc2.active_quantizers().input, fc1.active_quantizers().grad_output
    both = ("codes", "codes")
    alone = is_alone(of_input, (rows, width), second.parts["input"], *both)
    return alone and is_alone(of_gradient, (rows, features), first.parts["grad_output"], *both)


class SharedChunks(Chunks):
    """The loss of all tokens and its gradients, from this rank's tokens of h and its rows of the weight."""

    def __init__(self, call: SharedCall, targets: Tensor, count: Tensor, chunk: int) -> None:
        super().__init__(call, targets, count, chunk)
        self.group = call.exchange.parallel.group
        self._release: Callable[[], None] = lambda: None

    @staticmethod
    def sizes(call: SharedCall, h: Tensor, weight: Tensor) -> tuple[int, int]:
        exchange = call.exchange
        return math.prod(exchange.shape(h.shape[:-1])), exchange.parallel.group.size() * len(weight)

    def begin_input(self, h: Tensor, column: Output | None) -> Callable[[], Input]:
        call, takes = self.call, self.call.product_takes
        outputs = {"rowwise": takes, "columnwise": column}
        if len(self.spans) == 1:  # which is multiplied by the rows of each rank
            arriving = partial(quantize_tokens, call, "input", h, **outputs)
        elif (kept := self._kept_input(h)) is not None:
            self._release, arriving = kept.release, partial(self._quantize_kept, kept, outputs)
        else:
            arriving = Outgoing(call=call, tensor="input", lent=False, **outputs).begin(h)

        def result() -> Input:
            whole = arriving()
            return as_taken(whole.rowwise, takes), whole.columnwise and call.begin_whole_input(whole.columnwise)

        return result

    def _kept_input(self, h: Tensor) -> KeptRows | None:
        """Return the rows of h of all ranks, if ranks share the rows and both directions read unquantized values; else
        None."""
        part, quantizer = self.call.tokens_of("input", h), self.call.quantizers.input
        plain = all(format.high_precision for format in (quantizer.rowwise, quantizer.columnwise))
        return begin_kept_rows(h, part.group, part.runs) if part is not None and plain else None

    def _quantize_kept(self, kept: KeptRows, outputs: Mapping[str, Output | None]) -> HybridOperand:
        return self.call.quantize("input", kept.received(), **outputs)

    def whole_input(self, h: Tensor) -> Tensor:
        return self.call.gathered("input", h)

    def begin_sum(self, dx: Tensor) -> Pending:
        return self.call.begin_summed("grad_input", dx)

    def release(self) -> None:
        self._release()

    def rows(self, x: AnyOperand | RankRows, start: int, end: int) -> AnyOperand | RankRows:
        return x if isinstance(x, RankRows) else super().rows(x, start, end)

    def finds_amax(self) -> bool:
        return False  # an amax would be over the logits of all ranks

    def losses(self, logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
        boxes = meeting(self.group, logits.device, len(logits)) if gradient else None
        losses = None if boxes is None else joint_cross_entropy_(logits, targets, boxes, self.scale)
        if losses is not None:
            return losses
        first = self.group.rank() * logits.shape[1]
        own = loss_parts(logits, targets, first)
        parts = gather_rows(own, self.group).view(-1, *own.shape)
        return shared_cross_entropy_(logits, targets, parts, first, self.scale, gradient=gradient)
