"""Gradients of weights that wait for a call of their own: delay_wgrad_compute and backward_dw()."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError


class LaterGradients:
    """Linears whose gradients of weights may wait until backward_dw() is called, once after each backward."""

    waiting: deque[Callable[[], list[Tensor | None]]] | None = None
    """A function for each backward that has left its gradients of weights to later; None: none does."""

    def delay_wgrad(self, delay: bool, ranks: int) -> None:
        """Take the argument delay_wgrad_compute. UserError for linears that ranks share."""
        if delay and ranks > 1:
            raise UserError(
                f"{type(self).__name__}: delay_wgrad_compute=True has no counterpart here with tp_size={ranks}; leave"
                " it out: the gradients of weights are computed while others are exchanged"
            )
        self.waiting = deque() if delay else None

    def need_backward_dw(self) -> bool:
        """Whether backward leaves gradients of weights to backward_dw()."""
        return self.waiting is not None

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the gradients of the weights for the earliest backward that waits, and add them to `grad` or
        `main_grad`. Without delay_wgrad_compute, or if none waits, nothing is done. Gradients of biases do not wait."""
        if not self.waiting:
            return
        for weight, gradient in zip(self.weights, self.waiting.popleft()(), strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient

    def linear_facts(self) -> dict[str, Any]:
        """The fields of a LinearCall, as they are now."""
        return super().linear_facts() | {"waiting": self.waiting}
