"""TensorParallel: the part of a linear that knows the ranks which share it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.nn.core.context import current, use_kernels
from hqsweep.nn.core.parameter import AnyOperand, link_states
from hqsweep.nn.core.products import outside_autocast
from hqsweep.nn.core.residual import Branch, is_observed
from hqsweep.nn.linear.layernorm_linear import LayerNormLinear
from hqsweep.nn.linear.linear import Linear, as_rows
from hqsweep.nn.linear.linear_call import NOTHING, KnownInput
from hqsweep.nn.linear.linear_loss import check_head, forms_loss, product_cross_entropy
from hqsweep.ops.quantize.kernels import input_in
from hqsweep.parallel.overlap.chunked_input import Turns
from hqsweep.parallel.overlap.deferred_reduce import LeftGradient, LeftOutput
from hqsweep.parallel.overlap.overlapped_gemm import start_values
from hqsweep.parallel.overlap.prefetch import LayerWeights, Prefetched
from hqsweep.parallel.shared.attention import attend_in_turn
from hqsweep.parallel.shared.call import SharedCall
from hqsweep.parallel.shared.exchange import LinearShare
from hqsweep.parallel.shared.linear_function import Handover, NormedPart, SharedLinearFunction, handover_of
from hqsweep.parallel.shared.loss import SharedChunks
from hqsweep.parallel.shared.mlp import MLPCall, SharedMLPFunction, parts_are_alone
from hqsweep.parallel.shared.tokens import local
from hqsweep.parallel.shared.vocabulary import cross_entropy, vocabulary_group
from hqsweep.parallel.wire.local import local as stored


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
