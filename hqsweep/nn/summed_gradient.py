"""The gradient of a norm's output that ranks sum, left by the linear behind the norm to the norm's own backward, which
reads its summands in one pass with what it does.

Autograd knows this rank's summand as the gradient. That is safe since nobody but this linear reads the output, so that
autograd adds nothing to it, and since the norm's backward is the next thing that autograd does with it.
"""

from dataclasses import dataclass

from torch import Tensor

from hqsweep.dist.tokens import Pending, left_by


@dataclass(eq=False)
class SummedGradient:
    """Between one call of a norm and the linear that reads its output."""

    is_taken: bool = False
    """Whether the norm's backward takes what is left here."""
    left: tuple[Tensor, int] | None = None
    """What the other ranks have of the gradient, and the number of this one; None: the gradient is whole."""

    def leave(self, pending: Pending) -> Tensor:
        """The gradient as autograd is to know it: this rank's summand, or the whole sum."""
        summands = left_by(pending) if self.is_taken else None
        if summands is None:
            return pending()
        self.left = summands.received, summands.rank
        return summands.own

    def take(self, dh: Tensor | None) -> tuple[Tensor, int] | tuple[()]:
        """What was left, once, in the shape of the gradient that autograd has."""
        left, self.left = self.left, None
        return () if left is None or dh is None else (left[0].view(-1, *dh.shape), left[1])
