"""A linear over a vocabulary and its cross entropy in one, by chunks of tokens: the logits never exist whole.

Forward computes a chunk of logits in the linear's dtype, and overwrites it with its gradient. It quantizes this
gradient, and adds its products to the gradients of x and of the weight. Backward multiplies both by the incoming
gradient.

Values are the same as for Linear followed by the cross entropy of its output. Operands of x and of the weight are made
of the whole tensors, and a multiple of 128 rows of dy has the codes that it has in the whole. Only dw is a sum of the
chunks' products, in float32. If the quantizer of dy ties its rows together, there is one chunk.

Targets follow torch's cross_entropy: a row whose target is -100 has no loss, and the mean is over the others.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.formats import WHOLE, ExactOperand, Format
from hqsweep.gemm.exact import add_mm_t, mm_t
from hqsweep.nn.core.call import LinearCall
from hqsweep.nn.core.context import use_kernels
from hqsweep.nn.core.guards import once_differentiable, outside_autocast
from hqsweep.nn.core.parameter import AnyOperand, Weights, is_gathered, is_held, summed_main_grad, weight_matrix
from hqsweep.nn.linears import Gradient, Linear, as_rows, rows_of
from hqsweep.ops.quantize.kernels import in_dtype, input_in
from hqsweep.ops.quantize.request import Output
from hqsweep.ops.vocabulary import IGNORED, cross_entropy_, scale_
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.operand import HybridOperand, Operand
from hqsweep.recipe.sections import LinearQuantizers


def checked_targets(targets: Tensor, rows: int, vocabulary: int, device: torch.device, name: str) -> Tensor:
    """Return targets, int64 or uint8, as contiguous int64 [M] on a device. Each is an entry of the vocabulary or -100.

    UserError for another dtype, number or device, and on the CPU for other entries. The host does not wait for CUDA,
    where counted_rows() and torch's cross_entropy assert on the device.
    """
    if targets.dtype not in (torch.int64, torch.uint8):
        raise UserError(f"{name}: targets are {targets.dtype} {list(targets.shape)}; they take int64 entries")
    if targets.numel() != rows or targets.device.type != device.type:
        came = f"{targets.numel()} targets {list(targets.shape)} on {targets.device} for {rows} rows on {device}"
        raise UserError(f"{name}: got {came}; every row takes one, on its device, and {IGNORED} for no loss")
    indices = targets.detach().reshape(-1).to(torch.int64).contiguous()
    if indices.is_cpu and not torch.compiler.is_compiling():
        wrong = indices[(indices != IGNORED) & ((indices < 0) | (indices >= vocabulary))]
        if len(wrong):
            raise UserError(
                f"{name}: target {wrong[0].item()} is no entry of a vocabulary of {vocabulary}; targets are 0 to"
                f" {vocabulary - 1}, or {IGNORED} for no loss"
            )
    return indices


def counted_rows(targets: Tensor, vocabulary: int) -> Tensor:
    """Return the number of checked targets with a loss, float32 [].

    On CUDA a target outside the vocabulary ends in a device-side assertion.
    """
    counted, ones = targets != IGNORED, torch.ones((), device=targets.device).expand(vocabulary)
    return ones.gather(0, targets.where(counted, 0)).where(counted, 0.0).sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits [..., V] with targets [...], float32 [].

    It is torch's, in float32, NaN if all targets are -100. UserError as in checked_targets().
    """
    rows = logits.flatten(0, -2)
    return F.cross_entropy(rows.float(), checked_targets(targets, *rows.shape, rows.device, "cross_entropy"))


CHUNK_BYTES = 2**30
"""Bytes of a chunk's logits. More chunks take less memory, and each reads and writes dw once more."""
CHUNK_MULTIPLE = 128
"""The rows of a chunk are a multiple of this, so that no block of any format lies in two chunks."""


def forms_loss(head: Linear, h: Tensor) -> bool:
    """Return whether linear_cross_entropy computes the loss and its gradients by hqsweep's kernels.

    It does for bfloat16, without a bias and without a quantizer of the output, whole or by parts of the vocabulary.
    """
    are_sums = head.parallel is not None and head.parallel.mode == "row"
    plain = head.dtype == torch.bfloat16 and head.bias is None and not are_sums
    return plain and use_kernels(h) and head.active_quantizers().output is None


def is_by_rows(quantizers: LinearQuantizers) -> bool:
    """Return whether a multiple of 128 rows of dy has the same codes alone as within the whole.

    That excludes an amax of the whole, and random bits, whose key has the element's place.
    """
    q = quantizers.grad_output
    alone = type(q) is HybridQuantizer and not q.stochastic and not q.delayed
    return alone and _divides(q.rowwise, "rows") and _divides(q.columnwise, "cols")


def _divides(format: Format, axis: str) -> bool:
    """Return whether the entries of every buffer divide CHUNK_MULTIPLE along the axis."""
    sizes = [getattr(buffer, axis) for buffer in format.layout.values()]
    return all(size != WHOLE and CHUNK_MULTIPLE % size == 0 for size in sizes)


def chunk_rows(rows: int, vocabulary: int) -> int:
    """Return the rows of a chunk of bfloat16 logits: the fewest chunks of at most CHUNK_BYTES, as equal as possible."""
    most = max(CHUNK_BYTES // (2 * max(vocabulary, 1)) // CHUNK_MULTIPLE, 1) * CHUNK_MULTIPLE
    chunks = max(-(-rows // most), 1)
    return max(-(-rows // (chunks * CHUNK_MULTIPLE)), 1) * CHUNK_MULTIPLE


def linear_cross_entropy(h: Tensor, head: Linear, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Return the mean cross entropy of head(h) with targets, float32 []. h: [..., K]; targets: int64 [...].

    As in torch's cross_entropy, a token with target -100 has no loss and a gradient of 0. The mean is over the other
    tokens, and NaN if there are none.

    If `forms_loss` is true, forward computes the gradients of h and of the weight (or its main_grad), so that backward
    runs once. Otherwise it is torch's cross entropy of whole logits. chunk: the number of rows of logits that exist at
    once, a multiple of 128; it forces the first way, on any device.

    UserError for a chunk of a linear that has no such way, and for targets of another dtype, number or device. Targets
    other than -100 and entries of the vocabulary are refused: on the CPU by UserError, on CUDA by an assertion on the
    device, as in torch, since the host does not wait.
    """
    if head.parallel is not None:
        return head.parallel.cross_entropy(head, h, targets, chunk)
    if chunk is None and not forms_loss(head, h):
        return cross_entropy(head(h), targets)
    call = LinearCall(**head.linear_facts())
    check_head(head, call)
    return product_cross_entropy(call, h, head.weight, targets, chunk)


def check_head(head: Linear, call: LinearCall) -> None:
    """Raise UserError for a linear whose loss cannot be computed by chunks."""
    if head.bias is not None or call.quantizers.output is not None:
        raise UserError(f"{head.name}: a linear with a bias, or with a quantizer of its output, takes no chunks")


@outside_autocast
def product_cross_entropy(
    call: LinearCall,
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    chunks: "type[Chunks] | None" = None,
) -> Tensor:
    """Return linear_cross_entropy of h [..., K] and weight [V, K] by this call, always by chunks (a class of Chunks).

    The call has no quantizer of its output. UserError for more than one chunk if its rows depend on each other.
    """
    chunks = chunks or Chunks
    rows, vocabulary = chunks.sizes(call, h, weight)
    targets = checked_targets(targets, rows, vocabulary, h.device, call.name)
    count = counted_rows(targets, vocabulary)
    h = input_in(as_rows(h), call.dtype, call.name)
    if chunk is not None and (chunk <= 0 or chunk % CHUNK_MULTIPLE):
        raise UserError(f"{call.name}: a chunk has {chunk} rows; it takes a multiple of {CHUNK_MULTIPLE}")
    fault = _tie(call)
    if chunk is not None and fault and chunk < rows:
        raise UserError(f"{call.name}: {fault}; leave chunk out")
    chunk = chunk or (rows if fault else chunk_rows(rows, len(weight)))
    return LinearCrossEntropy.apply(h, call, chunks, targets, count, max(chunk, 1), weight)


def _tie(call: LinearCall) -> str | None:
    """Return the reason why the rows of a call depend on each other, so that they are one chunk."""
    if call.gemm == "native":
        return "gemm=native takes operands whole"
    if call.grad and not is_by_rows(call.quantizers):
        return f"grad_output is {call.quantizers.grad_output}, in which rows depend on each other"
    return None


Input = tuple[AnyOperand, Callable[[], AnyOperand] | None]
"""The operand of the input for fprop and, if wanted, the operand for wgrad, which may still be on its way."""


class LinearCrossEntropy(torch.autograd.Function):
    """h [M, K] in call.dtype, targets [M], count [], weight [V, K] -> the mean cross entropy of h @ weight.T, float32
    [].

    `count` is the number of targets with a loss. The loss is computed by chunks of rows.
    """

    @staticmethod
    def forward(
        ctx,
        h: Tensor,
        call: LinearCall,
        kind: "type[Chunks]",
        targets: Tensor,
        count: Tensor,
        chunk: int,
        weight: Tensor,
    ) -> Tensor:
        needs = [call.grad and ctx.needs_input_grad[i] for i in (0, 6)]
        if is_held((weight,)) or call.main_grad:
            call.check_weights((weight,), *needs)
        ctx.call, ctx.done = call, False
        ctx.weight = weight if call.main_grad else None
        loss, dx, dw = kind(call, targets, count, chunk).run(h, (weight,), *needs)
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
        return dx, None, None, None, None, None, dw


class Chunks:
    """The loss of a call and its gradients, chunk by chunk. targets: [M]; `count` []: the number of targets with a
    loss."""

    def __init__(self, call: LinearCall, targets: Tensor, count: Tensor, chunk: int) -> None:
        self.call, self.targets, rows = call, targets, len(targets)
        self.spans = [(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk)]
        self.scale = count.reciprocal()
        self.of_counted = rows / count
        """M / count, which turns a mean over all rows into a mean over rows with a loss; exactly 1 if all rows have
        one."""

    @staticmethod
    def sizes(call: LinearCall, h: Tensor, weight: Tensor) -> tuple[int, int]:
        """M and V, of h [..., K] and of a weight."""
        return h.shape[:-1].numel(), len(weight)

    def run(self, h: Tensor, weights: Weights, needs_dx: bool, needs_dw: bool) -> tuple[Tensor, Gradient, Gradient]:
        """Return the mean loss of h [M, K] in call.dtype, the gradient of h, and the float32 gradient of the weight [V,
        K]."""
        call, takes, probe = self.call, self.call.product_takes, self.call.context.probe
        row, column = (takes if needed else None for needed in (needs_dx, needs_dw))
        arriving = self.begin_input(h, column)
        w, w_column = self._weight(weights, needs_dx)
        x, x_arriving = arriving()
        formed = (call.product("fprop", self.rows(x, *span), w, call.dtype) for span in self.spans)
        if probe:  # it sees whole tensors
            whole = torch.cat(list(formed))
            probed = call.probe_forward(self.whole_input(h), weights, whole)
            formed = (whole[start:end] for start, end in self.spans)
        losses, dx, dw, x_column = [], None, None, None
        for span in self.spans:
            loss, dy = self._gradient(next(formed), span, row, column)
            losses.append(loss)
            if needs_dx:
                dx = self._dgrad(dx, dy.rowwise, w_column, span)
                if span == self.spans[-1]:
                    dx_sum = self.begin_sum(dx)
            if needs_dw:
                x_column = x_column or as_taken(x_arriving(), takes)
                dw = _added(call, dw, dy.columnwise, _columns(x_column, *span))
            del dy  # before the next chunk is formed
        self.release()
        dx = dx_sum() if needs_dx else None
        if probe and (needs_dx or needs_dw):
            self._probe_gradients(whole, probed, dx, dw)
        return _joined(losses).mean() * self.of_counted, dx if dx is None else call.rounded("grad_input", dx), dw

    # What ranks that share the linear do otherwise (hqsweep.parallel.shared.linear).

    def begin_input(self, h: Tensor, column: Output | None) -> Callable[[], Input]:
        """Start to make the operands of all rows of h."""

        def result() -> Input:
            operands = self.call.quantize("input", h, rowwise=self.call.product_takes, columnwise=column)
            return operands.rowwise, operands.columnwise and (lambda: operands.columnwise)

        return result

    def whole_input(self, h: Tensor) -> Tensor:
        """The rows of h of all ranks."""
        return h

    def begin_sum(self, dx: Tensor) -> Callable[[], Tensor]:
        """Start the sum over ranks of dx, the gradient of h. Its result is read when wgrad is computed."""
        return lambda: dx

    def release(self) -> None:
        """End the use of the rows of h that other ranks have sent."""

    def rows(self, x: AnyOperand, start: int, end: int) -> AnyOperand:
        """Return rows of an exact operand, as views; any other operand whole."""
        return x if start == 0 and end == _count(x, 0) else rows_of(x, start, end)

    def losses(self, logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
        """Return the losses of a chunk, float32 [rows]. gradient: whether the gradient of the logits overwrites
        them."""
        return cross_entropy_(logits, targets, self.scale, gradient=gradient)

    def _dgrad(self, dx: Gradient, dy: AnyOperand, w: AnyOperand, span: tuple[int, int]) -> Tensor:
        """Return dx with the rows of a chunk written."""
        call = self.call
        if len(self.spans) == 1:
            return call.product("dgrad", dy, w, call.dtype)
        if dx is None:
            dx = self.scale.new_empty(len(self.targets), _count(w, 0), dtype=call.dtype)
        mm_t(dy, w, out_dtype=call.dtype, out=dx[slice(*span)])
        return dx

    def _weight(self, weights: Weights, needs_dx: bool) -> tuple[AnyOperand, AnyOperand | None]:
        """Return the operands of the weight for fprop and, if wanted, for dgrad, from one read."""
        call, takes = self.call, self.call.product_takes
        if needs_dx and call.workspace is None and not (is_held(weights) or is_gathered(weights)):
            both = call.quantize("weight", weight_matrix(weights, call.dtype), rowwise=takes, columnwise=takes)
            return both.rowwise, both.columnwise
        row = call.weight(weights, "rowwise", needs_dx=needs_dx)
        return row, call.weight(weights, "columnwise") if needs_dx else None

    def _gradient(
        self, logits: Tensor, span: tuple[int, int], row: Output | None, column: Output | None
    ) -> tuple[Tensor, HybridOperand | None]:
        """Return the losses of a chunk, and the operands of the gradient of its logits."""
        targets, call = self.targets[slice(*span)], self.call
        outputs, needed = {"rowwise": row, "columnwise": column}, bool(row or column)
        if needed and self.finds_amax():
            amax = torch.zeros((1, 1), dtype=torch.float32, device=logits.device)
            losses = cross_entropy_(logits, targets, self.scale, gradient=True, amax=amax)
            return losses, call.quantize_under("grad_output", logits, amax, **outputs)
        losses = self.losses(logits, targets, gradient=needed)
        return losses, call.quantize("grad_output", logits, **outputs) if needed else None

    def finds_amax(self) -> bool:
        """Return whether the kernel of the loss finds the amax for the quantization of the gradient."""
        quantizer = self.call.quantizers.grad_output
        return len(self.spans) == 1 and type(quantizer) is HybridQuantizer and quantizer.takes_amax

    def _probe_gradients(self, dy: Tensor, probed: tuple, dx: Gradient, dw: Gradient) -> None:
        call, (x, weights) = self.call, probed
        call.probe_parts("grad_output", dy)
        if dx is not None:
            call.probe_gemms("dgrad", [dy], [w.t() for w in weights], [dx])
        if dw is not None:
            call.probe_gemms("wgrad", [dy.t()], [x.t()], [dw])


def as_taken(operand: AnyOperand, takes: Output) -> AnyOperand:
    """Return the operand as products take it. Codes from other ranks may still need decoding."""
    return operand.operand() if takes == "exact" and isinstance(operand, Operand) else operand


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _columns(operand: AnyOperand, start: int, end: int) -> AnyOperand:
    """Return a part of an exact operand along the contracted axis, as views; any other operand whole."""
    if start == 0 and end == _count(operand, 1):
        return operand
    return ExactOperand(operand.matrix[:, start:end], operand.factor, operand.divisor)


def _count(operand: AnyOperand, axis: int) -> int:
    return (operand.matrix.shape if isinstance(operand, ExactOperand) else operand.shape)[axis]


def _added(call: LinearCall, total: Gradient, dy: AnyOperand, x: AnyOperand) -> Tensor:
    """Return total plus the product of a chunk, in float32."""
    if total is None:
        return call.product("wgrad", dy, x, torch.float32)
    add_mm_t(total, dy, x)
    return total
