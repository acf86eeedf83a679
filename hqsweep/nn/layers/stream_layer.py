"""StreamLayer: the residual stream and the recomputation that all transformer layers share."""

from typing import Any

from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.nn.core.context import recomputed
from hqsweep.nn.core.residual import Branch, add_branch, is_observed

RECOMPUTES = ("none", "layer", "attention")


def with_sum(outputs: Any) -> tuple[Any, ...]:
    """Return a layer's forward outputs in the form of residual(): the stream, no branch, then the rest."""
    x, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    return x, None, *others


class StreamLayer(nn.Module):
    """A layer x [B, T, D] -> its stream, and further outputs.

    A subclass defines _residual(x, branch, checkpoint_core_attention) -> (x, branch, ...); its stream is x + branch.
    """

    _recompute = "none"

    @property
    def recompute(self) -> str:
        """The part that backward recomputes: "none", the whole "layer", or the core of "attention".

        "layer" keeps only the stream's sum. Recomputation belongs to the layer's forward, inside anything that compiles
        or shards the layer. So a unit of fully_shard is gathered once in backward, for recomputation and gradients.
        UserError for another word.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, part: str) -> None:
        if part not in RECOMPUTES:
            words = f"{type(self).__name__}: recompute is {part!r}; it takes {', '.join(RECOMPUTES[:-1])}"
            raise UserError(f"{words} or {RECOMPUTES[-1]}")
        self._recompute = part

    def forward(self, x: Tensor, checkpoint_core_attention: bool = False) -> Any:
        if self.recompute == "layer":
            return recomputed(self._forward, x, checkpoint_core_attention)
        return self._forward(x, checkpoint_core_attention)

    def residual(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool = False) -> tuple[Any, ...]:
        """Return forward(x + branch) with the last sum left to the reader: (x, branch), then further outputs.

        An observed layer, and a layer recomputed as a whole, compute that sum themselves; branch is then None.
        """
        if is_observed(self) or self.recompute == "layer":
            call = self if is_observed(self) else self.forward
            return with_sum(call(add_branch(x, branch), *([True] if checkpoint_core_attention else [])))
        return self._residual(x, branch, self._checkpoints_core(checkpoint_core_attention))

    def _forward(self, x: Tensor, checkpoint_core_attention: bool) -> Any:
        x, branch, *others = self._residual(x, None, self._checkpoints_core(checkpoint_core_attention))
        x = add_branch(x, branch)
        return (x, *others) if others else x

    def _checkpoints_core(self, asked: bool) -> bool:
        return asked or self.recompute == "attention"

    def _residual(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool) -> tuple[Any, ...]:
        raise NotImplementedError
