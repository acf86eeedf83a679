"""Sums over ranks between linears and norms, left to who reads them next: outputs by a linear to the norm behind it, in
forward, and gradients by a linear to the norm before it, in backward. The norm reads the summands in one pass with what
it does. What is sent next then travels beside products that nobody waits for:

forward   linear -> LeftOutput -> norm -> linear
backward  linear <- the gradient of that output, which norms send at once <- norm <- LeftGradient <- linear, whose
          weight's gradient comes after the norm's backward, while that travels

Autograd knows this rank's summand as the tensor. That is safe since nobody else reads it, so that autograd adds nothing
to its gradient, and since the reader is the next thing that runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hqsweep.nn.core.products import once_differentiable
from hqsweep.parallel.overlap.overlapped_gemm import Outgoing
from hqsweep.parallel.wire.p2p_copy import Sending
from hqsweep.parallel.wire.tokens import Pending, Summands, left_by
from hqsweep.quant.operand import HybridOperand

Arriving = Callable[[], HybridOperand]
WeightGradient = Callable[[], Tensor | None]


@dataclass(eq=False)
class LeftOutput:
    """Between one call of a linear and the norm that alone reads its output."""

    summands: Summands | None = None
    outgoing: Outgoing | None = None
    """The gradient of the output, whose operands backward asks for."""
    owed: list[Callable[[], None]] = field(default_factory=list)
    """What backward may do before it has the gradient: it makes operands of weights."""
    _sent: tuple[Tensor, Arriving] | None = field(default=None, init=False)

    def leave(self, pending: Pending) -> Tensor:
        """The output as autograd is to know it: this rank's summand, or the whole sum."""
        self.summands = left_by(pending)
        return pending() if self.summands is None else self.summands.own

    def take(self, y: Tensor) -> Tensor | Summands:
        """The output y for the norm, once: the call lives until backward, and summands must not."""
        summands, self.summands = self.summands, None
        return y if summands is None else summands.of(y)._replace(writer=self)

    def prepare(self) -> None:
        """Do what is owed, before other ranks are waited for."""
        for work in self.owed:
            work()

    def place(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Where to write the gradient (nn.core.wire.GradientReader)."""
        return None if self.outgoing is None else self.outgoing.place(like, dtype)

    def tell(self, dy: Tensor) -> None:
        """Send the gradient."""
        if self.outgoing is not None:
            dy = dy.reshape(-1, dy.shape[-1])
            self._sent = dy, self.outgoing.begin(dy)

    def operands(self, dy: Tensor) -> HybridOperand | None:
        """The operands of the gradient dy, once; None where it was not sent."""
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        operands = sent[1]()  # also of another tensor: all ranks wait for what they began
        return operands if sent[0].data_ptr() == dy.data_ptr() else None


@dataclass(eq=False)
class LeftGradient:
    """Between one call of a norm and the linear that alone reads its output."""

    name: str
    """The linear's, for messages."""
    start: Callable[[Tensor, torch.dtype], Sending | None]
    """Begins to exchange the output, which has the shape of a tensor, where the norm is to send it as it is computed
    (parallel.overlap.overlapped_gemm.start_values)."""
    sent: Sending | None = None
    """The exchange that has begun so, for the linear."""
    is_taken: bool = False
    """Whether the norm's backward takes what is left here."""
    left: tuple[Pending, int] | None = None
    """What the other ranks have of the gradient, and the number of this one; None: the gradient is whole."""
    late: WeightGradient | None = None
    """The gradient of the linear's weight, which is still to be computed."""
    _drawn: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def leave(self, pending: Pending) -> Tensor:
        """The gradient as autograd is to know it: this rank's summand, or the whole sum."""
        summands = left_by(pending) if self.is_taken else None
        if summands is None:
            return pending()
        self.left = summands.arriving, summands.rank
        return summands.own

    def take(self, dh: Tensor | None) -> tuple[Tensor, int] | tuple[()]:
        """What was left, once, in the shape of the gradient that autograd has."""
        left, self.left = self.left, None
        return () if left is None or dh is None else (left[0]().view(-1, *dh.shape), left[1])

    @contextmanager
    def sending(self, x: Tensor, dtype: torch.dtype) -> Iterator[Sequence[Tensor]]:
        """Memory of other ranks, of the shape of x and a dtype, that gets the norm's output, too, inside; or none."""
        sending = self.start(x, dtype)
        if sending is None:
            yield ()
            return
        yield [sending.place(other).view(dtype).view(x.shape) for other in sending.others]
        sending.written()
        self.sent = sending

    def before_norm(self, weight: Tensor) -> None:
        """Note that the norm runs next. Of what can run in backward, autograd takes first what forward ran last: the
        ticket that is drawn here asks for `late` behind the norm's backward, and before all that came before."""
        self._drawn = weight, _LateGradient.apply(weight, self)

    def ticket(self) -> tuple[Tensor, Tensor]:
        """The weight, and the ticket that the linear's function of autograd takes beside it, once: a tensor of no
        elements, whose gradient is such a one; it needs none where the weight needs none."""
        drawn, self._drawn = self._drawn, None
        return drawn


class _LateGradient(torch.autograd.Function):
    """A tensor of no elements, whose backward computes the gradient of the weight."""

    @staticmethod
    def forward(ctx, weight: Tensor, gradient: LeftGradient) -> Tensor:
        ctx.call = gradient
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple[Tensor | None, None]:
        late, ctx.call.late = ctx.call.late, None
        return None if late is None else late(), None
