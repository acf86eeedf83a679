"""A linear over a vocabulary and its cross entropy in one, by chunks of tokens: the logits never exist whole.

A chunk of logits is formed in the linear's dtype, its gradient takes its place, is quantized, and goes into the
gradients of x and of the weight, all in forward; backward multiplies both by the gradient that comes in. Values are
those of Linear followed by the cross entropy of its output: the operands of x and of the weight are made of the whole
tensors, and rows of dy, 128 or a multiple of that, have the codes that they have in the whole. Only dw is a sum of the
chunks' products, in float32. Where the quantizer of dy ties its rows together there is one chunk. Ranks that share the
vocabulary tell each other four numbers of each row of a chunk (ops.loss_parts).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, ExactOperand, Format
from hqsweep.gemm.exact import add_mm_t, mm_t
from hqsweep.nn.core.context import use_kernels
from hqsweep.nn.core.parameter import is_gathered, is_held, summed_main_grad, weight_matrix
from hqsweep.nn.core.products import once_differentiable, outside_autocast
from hqsweep.nn.linear.linear import Linear, as_rows
from hqsweep.nn.linear.linear_call import AnyOperand, LinearCall
from hqsweep.nn.linear.vocabulary import checked_targets, counted_rows, cross_entropy
from hqsweep.ops.model.loss import cross_entropy_, joint_cross_entropy_, loss_parts, scale_, shared_cross_entropy_
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.overlap.loss_mailbox import meeting
from hqsweep.parallel.overlap.overlapped_gemm import Outgoing, RankRows, quantize_tokens, rows_of
from hqsweep.parallel.wire.tokens import KeptRows, begin_kept_rows, gather_rows
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.recipe.sections import LinearQuantizers

Gradient = Tensor | None

CHUNK_BYTES = 2**30
"""Logits of a chunk; more chunks take less memory, and read and write dw once more each."""
CHUNK_MULTIPLE = 128
"""Rows of a chunk are a multiple of it, so that no block of any format lies in two chunks."""


def forms_loss(head: Linear, h: Tensor) -> bool:
    """Whether linear_cross_entropy forms the loss of this linear and h, and its gradients, itself: on hqsweep's
    kernels, in bfloat16, without a bias and without a quantizer of the output, whole or by parts of the vocabulary."""
    plain = head.dtype == torch.bfloat16 and head.bias is None and not _sums_logits(head)
    return plain and use_kernels(h) and head.active_quantizers().output is None


def _sums_logits(head: Linear) -> bool:
    """Whether logits are sums over ranks."""
    return head.parallel is not None and head.parallel.mode == "row"


def is_by_rows(quantizers: LinearQuantizers) -> bool:
    """Whether rows of dy, 128 or a multiple of that, are quantized as they are within the whole: without an amax of the
    whole, and without random bits, which are keyed by the place."""
    q = quantizers.grad_output
    alone = type(q) is HybridQuantizer and not q.stochastic and not q.delayed
    return alone and _divides(q.rowwise, "rows") and _divides(q.columnwise, "cols")


def _divides(format: Format, axis: str) -> bool:
    """Whether entries of every buffer cover a part of CHUNK_MULTIPLE along the axis."""
    sizes = [getattr(buffer, axis) for buffer in format.layout.values()]
    return all(size != WHOLE and CHUNK_MULTIPLE % size == 0 for size in sizes)


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Rows of a chunk of bfloat16 logits: of the fewest chunks with at most CHUNK_BYTES each, the smallest."""
    most = max(CHUNK_BYTES // (2 * max(vocabulary, 1)) // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE
    chunks = max(-(-rows // most), 1)
    return max(-(-rows // (chunks * CHUNK_MULTIPLE)), 1) * CHUNK_MULTIPLE


def linear_cross_entropy(h: Tensor, head: Linear, targets: Tensor, chunk: int | None = None) -> Tensor:
    """The mean over tokens of the cross entropy of head(h) with targets, float32 []: h [..., K], targets int64 [...]
    of as many tokens, entries of the vocabulary. As in torch's cross_entropy a token whose target is -100 has no loss
    and a gradient of 0, the mean is over the others, and it is NaN where there are none.

    Where `forms_loss` says so, gradients of h and of the weight (or its main_grad) are formed in forward, so that
    backward runs once; elsewhere it is torch's cross entropy of whole logits. chunk: rows of logits that exist at once,
    a multiple of 128, and the first of the two ways, on any device.

    UserError for a chunk of a linear that has no such way, and for targets of another dtype, number or device. Other
    targets than -100 and entries are refused: on the CPU by UserError; on CUDA by an assertion on the device, as torch
    does it, since nothing waits for them.
    """
    if chunk is None and not forms_loss(head, h):
        return cross_entropy(head(h), targets, vocabulary_group(head))
    return _formed(head, h, targets, chunk)


def _formed(head: Linear, h: Tensor, targets: Tensor, chunk: int | None) -> Tensor:
    if _sums_logits(head):
        raise UserError(f"{head.name}: a linear whose logits are sums over ranks takes no chunks")
    call = LinearCall(**head.linear_facts(), exchange=head.exchange(h.shape[:-1]))
    if head.bias is not None or call.quantizers.output is not None:
        raise UserError(f"{head.name}: a linear with a bias, or with a quantizer of its output, takes no chunks")
    return product_cross_entropy(call, h, head.own(head.weight), targets, chunk)


@outside_autocast
def product_cross_entropy(
    call: LinearCall, h: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None
) -> Tensor:
    """linear_cross_entropy of h [..., K] and weight [V, K] by this call, which has no quantizer of its output, always
    by chunks. UserError for more than one chunk where its rows depend on each other."""
    rows = math.prod(call.exchange.shape(h.shape[:-1]) if call.exchange else h.shape[:-1])
    ranks = 1 if call.exchange is None else call.exchange.parallel.group.size()
    targets = checked_targets(targets, rows, ranks * len(weight), h.device, call.name)
    count = counted_rows(targets, ranks * len(weight))
    h = input_in(as_rows(h), call.dtype, call.name)
    if chunk is not None and (chunk <= 0 or chunk % CHUNK_MULTIPLE):
        raise UserError(f"{call.name}: a chunk has {chunk} rows; it takes a multiple of {CHUNK_MULTIPLE}")
    fault = _tie(call)
    if chunk is not None and fault and chunk < rows:
        raise UserError(f"{call.name}: {fault}; leave chunk out")
    chunk = chunk or (rows if fault else chunk_rows(rows, len(weight)))
    return LinearCrossEntropy.apply(h, call, targets, count, max(chunk, 1), weight)


def _tie(call: LinearCall) -> str | None:
    """What ties the rows of a call together, so that they are one chunk."""
    if call.gemm == "native":
        return "gemm=native takes operands whole"
    if call.grad and not is_by_rows(call.quantizers):
        return f"grad_output is {call.quantizers.grad_output}, in which rows depend on each other"
    return None


_Input = tuple[AnyOperand | RankRows, Callable[[], AnyOperand] | None]
"""The operand of the input for fprop and, if wanted, that for wgrad, which may still be on its way."""


class LinearCrossEntropy(torch.autograd.Function):
    """h [M, K] in call.dtype, targets [M], of which `count` [] have a loss, weight [V, K] -> the mean cross entropy of
    h @ weight.T, float32 []. Where ranks share the linear h may be a rank's tokens of the M, and the weight its rows of
    the whole."""

    @staticmethod
    def forward(ctx, h: Tensor, call: LinearCall, targets: Tensor, count: Tensor, chunk: int, weight: Tensor) -> Tensor:
        needs = [call.grad and ctx.needs_input_grad[i] for i in (0, 5)]
        if is_held((weight,)) or call.main_grad:
            call.check_weights((weight,), *needs)
        ctx.call, ctx.done = call, False
        ctx.weight = weight if call.main_grad else None
        loss, dx, dw = _Chunks(call, h, weight, targets, count, chunk).run(*needs)
        dw = dw if dw is None or call.main_grad else in_dtype(dw, weight.dtype)
        ctx.has = [gradient is not None for gradient in (dx, dw)]
        ctx.save_for_backward(*(gradient for gradient in (dx, dw) if gradient is not None))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Gradient, ...]:
        if ctx.done:
            raise UserError(f"{ctx.call.name}: the gradients of linear_cross_entropy were given to a backward before")
        ctx.done, saved = True, iter(ctx.saved_tensors)
        dx, dw = (scale_(next(saved), gradient) if there else None for there in ctx.has)
        if dw is not None and ctx.weight is not None:
            summed_main_grad(ctx.weight).add_(dw)
            dw = None
        return dx, None, None, None, None, dw


class _Chunks:
    """The loss and its gradients, chunk by chunk; on every rank of those that share the linear."""

    def __init__(self, call: LinearCall, h: Tensor, weight: Tensor, targets: Tensor, count: Tensor, chunk: int) -> None:
        self.call, self.h, self.weights, self.targets = call, h, (weight,), targets
        rows = len(targets)
        self.group = None if call.exchange is None else call.exchange.parallel.group
        self.spans = [(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk)]
        self.scale = count.reciprocal()
        self.of_counted = rows / count
        """The factor of a mean over all rows that makes it one over those with a loss; 1, to the bit, where all have
        one."""
        self.release: Callable[[], None] = lambda: None
        """Ends the use of what other ranks sent of h."""

    def run(self, needs_dx: bool, needs_dw: bool) -> tuple[Tensor, Gradient, Gradient]:
        """The mean loss, the gradient of h, and that of the weight in float32."""
        call, takes, probe = self.call, self.call.product_takes, self.call.context.probe
        row, column = (takes if needed else None for needed in (needs_dx, needs_dw))
        arriving = self._begin_input(column)
        w, w_column = self._weight(needs_dx)
        x, x_arriving = arriving()
        formed = (call.product("fprop", _rows(x, *span), w, call.dtype) for span in self.spans)
        if probe:  # it sees whole tensors
            whole = torch.cat(list(formed))
            probed = call.probe_forward(call.gathered("input", self.h), self.weights, whole)
            formed = (whole[start:end] for start, end in self.spans)
        losses, dx, dw, x_column = [], None, None, None
        for span in self.spans:
            loss, dy = self._gradient(next(formed), span, row, column)
            losses.append(loss)
            if needs_dx:
                dx = self._dgrad(dx, dy.rowwise, w_column, span)
                if span == self.spans[-1]:  # which is summed beside wgrad
                    dx_sum = call.begin_summed("grad_input", dx)
            if needs_dw:
                x_column = x_column or _as_taken(x_arriving(), takes)
                dw = _added(call, dw, dy.columnwise, _columns(x_column, *span))
            del dy  # before the next chunk is formed
        self.release()
        dx = dx_sum() if needs_dx else None
        if probe and (needs_dx or needs_dw):
            self._probe_gradients(whole, probed, dx, dw)
        return _joined(losses).mean() * self.of_counted, dx if dx is None else call.rounded("grad_input", dx), dw

    def _dgrad(self, dx: Gradient, dy: AnyOperand, w: AnyOperand, span: tuple[int, int]) -> Tensor:
        """dx, with the rows of a chunk in it."""
        call = self.call
        if len(self.spans) == 1:
            return call.product("dgrad", dy, w, call.dtype)
        if dx is None:
            dx = self.h.new_empty(len(self.targets), self.h.shape[1], dtype=call.dtype)
        mm_t(dy, w, out_dtype=call.dtype, out=dx[slice(*span)])
        return dx

    def _begin_input(self, column: Output | None) -> Callable[[], "_Input"]:
        """The operands of all rows of h, which may be on their way."""
        call, takes = self.call, self.call.product_takes
        outputs = {"rowwise": takes, "columnwise": column}
        if len(self.spans) == 1:  # which is multiplied by the rows of each rank
            arriving = partial(quantize_tokens, call, "input", self.h, **outputs)
        elif (kept := self._kept_input()) is not None:
            self.release, arriving = kept.release, partial(self._quantize_kept, kept, outputs)
        else:
            arriving = Outgoing(call=call, tensor="input", lent=False, **outputs).begin(self.h)

        def result() -> _Input:
            whole = arriving()
            return _as_taken(whole.rowwise, takes), whole.columnwise and call.begin_whole_input(whole.columnwise)

        return result

    def _kept_input(self) -> KeptRows | None:
        """The rows of h of all ranks, if these have some each, and both directions read them as they are."""
        part, quantizer = self.call.tokens_of("input", self.h), self.call.quantizers.input
        plain = all(format.high_precision for format in (quantizer.rowwise, quantizer.columnwise))
        return begin_kept_rows(self.h, part.group, part.runs) if part is not None and plain else None

    def _quantize_kept(self, kept: KeptRows, outputs: Mapping[str, Output | None]) -> HybridOperand:
        return self.call.quantize("input", kept.received(), **outputs)

    def _weight(self, needs_dx: bool) -> tuple[AnyOperand, AnyOperand | None]:
        """The operands of the weight for fprop and, if wanted, for dgrad, from one read."""
        call, takes = self.call, self.call.product_takes
        if needs_dx and call.workspace is None and not (is_held(self.weights) or is_gathered(self.weights)):
            both = call.quantize("weight", weight_matrix(self.weights, call.dtype), rowwise=takes, columnwise=takes)
            return both.rowwise, both.columnwise
        row = call.weight(self.weights, "rowwise", needs_dx=needs_dx)
        return row, call.weight(self.weights, "columnwise") if needs_dx else None

    def _gradient(
        self, logits: Tensor, span: tuple[int, int], row: Output | None, column: Output | None
    ) -> tuple[Tensor, HybridOperand | None]:
        """The losses of a chunk, whose logits give way to their gradient, and the operands of that."""
        targets, quantizer, call = self.targets[slice(*span)], self.call.quantizers.grad_output, self.call
        outputs, needed = {"rowwise": row, "columnwise": column}, bool(row or column)
        if self.group is not None:
            losses = self._shared(logits, targets, needed)
            return losses, call.quantize("grad_output", logits, **outputs) if needed else None
        if not needed:
            return cross_entropy_(logits, targets, self.scale, gradient=False), None
        if len(self.spans) > 1 or type(quantizer) is not HybridQuantizer or not quantizer.takes_amax:
            losses = cross_entropy_(logits, targets, self.scale, gradient=True)
            return losses, call.quantize("grad_output", logits, **outputs)
        amax = torch.zeros((1, 1), dtype=torch.float32, device=logits.device)
        losses = cross_entropy_(logits, targets, self.scale, gradient=True, amax=amax)
        return losses, call.quantize_under("grad_output", logits, amax, **outputs)

    def _shared(self, logits: Tensor, targets: Tensor, gradient: bool) -> Tensor:
        """The losses of a chunk whose vocabulary ranks share, of which `logits` are this rank's."""
        boxes = meeting(self.group, logits.device, len(logits)) if gradient else None
        losses = None if boxes is None else joint_cross_entropy_(logits, targets, boxes, self.scale)
        if losses is not None:
            return losses
        first = self.group.rank() * logits.shape[1]
        own = loss_parts(logits, targets, first)
        parts = gather_rows(own, self.group).view(-1, *own.shape)
        return shared_cross_entropy_(logits, targets, parts, first, self.scale, gradient=gradient)

    def _probe_gradients(self, dy: Tensor, probed: tuple, dx: Gradient, dw: Gradient) -> None:
        call, (x, weights) = self.call, probed
        call.probe_parts("grad_output", dy)
        if dx is not None:
            call.probe_gemms("dgrad", [dy], [w.t() for w in weights], [dx])
        if dw is not None:
            call.probe_gemms("wgrad", [dy.t()], [x.t()], [dw])


def _as_taken(operand: AnyOperand | RankRows, takes: Output) -> AnyOperand | RankRows:
    """The operand as products take it; codes that have come from other ranks may still have to be decoded."""
    return operand.operand() if takes == "exact" and isinstance(operand, Operand) else operand


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(operand: AnyOperand | RankRows, start: int, end: int) -> AnyOperand | RankRows:
    """Some rows of an exact operand, as views; of any operand all of them."""
    if isinstance(operand, RankRows) or (start == 0 and end == _count(operand, 0)):
        return operand
    return rows_of(operand, start, end)


def _columns(operand: AnyOperand, start: int, end: int) -> AnyOperand:
    """Some of the contracted axis of an exact operand, as views; of any operand all of it."""
    if start == 0 and end == _count(operand, 1):
        return operand
    return ExactOperand(operand.matrix[:, start:end], operand.factor, operand.divisor)


def _count(operand: AnyOperand, axis: int) -> int:
    return (operand.matrix.shape if isinstance(operand, ExactOperand) else operand.shape)[axis]


def _added(call: LinearCall, total: Gradient, dy: AnyOperand, x: AnyOperand) -> Tensor:
    """The total so far plus the product of a chunk, in float32."""
    if total is None:
        return call.product("wgrad", dy, x, torch.float32)
    add_mm_t(total, dy, x)
    return total


def vocabulary_group(head: Linear) -> Any:
    """The ranks that have each a part of the vocabulary; None where there are none."""
    return None if head.parallel is None or head.parallel.mode != "column" else head.parallel.group
