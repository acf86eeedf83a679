"""SharedChunks: the chunks of linear_cross_entropy if ranks share the vocabulary, or the tokens.

Ranks that share the vocabulary exchange four numbers for each row of a chunk (ops.model.loss.loss_parts).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from hqsweep.nn.core.parameter import AnyOperand
from hqsweep.nn.linear.linear_loss import Chunks, Input, as_taken
from hqsweep.ops.model.loss import joint_cross_entropy_, loss_parts, shared_cross_entropy_
from hqsweep.ops.quantize.request import Output
from hqsweep.parallel.overlap.loss_mailbox import meeting
from hqsweep.parallel.overlap.overlapped_gemm import Outgoing, quantize_tokens
from hqsweep.parallel.overlap.rank_rows import RankRows
from hqsweep.parallel.shared.call import SharedCall
from hqsweep.parallel.wire.tokens import KeptRows, Pending, begin_kept_rows, gather_rows
from hqsweep.quant.operand import HybridOperand


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
        return False  # which is that of all ranks' logits

    def losses(self, logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
        boxes = meeting(self.group, logits.device, len(logits)) if gradient else None
        losses = None if boxes is None else joint_cross_entropy_(logits, targets, boxes, self.scale)
        if losses is not None:
            return losses
        first = self.group.rank() * logits.shape[1]
        own = loss_parts(logits, targets, first)
        parts = gather_rows(own, self.group).view(-1, *own.shape)
        return shared_cross_entropy_(logits, targets, parts, first, self.scale, gradient=gradient)
