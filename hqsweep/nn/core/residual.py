"""The residual stream between modules: a norm adds the branch before it as it reads the stream, in one pass.

Modules pass on (x, branch). The stream is x + branch; branch is the output of the previous module, or None. If ranks
share the previous module, the branch may be Summands: the norm then adds up the summands of all ranks, too. StreamLayer
has the stream and the recomputation that all layers share.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hqsweep.errors import UserError
from hqsweep.nn.core.context import recomputed
from hqsweep.nn.core.wire import Summands
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.torch_private import has_global_hooks, hook_tables, is_compiled

RESIDUAL = "_residual"
"""The name of the method by which layers pass on (x, branch)."""
KNOWN_HOOKS = "_hqsweep_known_hooks"
"""The attribute of a layer for the ids of hooks that run around RESIDUAL as they do around its forward."""
OWN = "hqsweep."
"""Classes in modules with this beginning have such a method beside their forward."""


Branch = Tensor | Summands | None


class _Sum(Function):
    """Return the sum of Summands. Backward gives its gradient to this rank's summand."""

    @staticmethod
    def forward(ctx, own: Tensor, summands: Summands) -> Tensor:
        return summands.total()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def whole(branch: Branch) -> Tensor | None:
    """Return the branch as one tensor."""
    return branch if branch is None or isinstance(branch, Tensor) else _Sum.apply(branch.own, branch)


def add_branch(x: Tensor, branch: Branch) -> Tensor:
    """Return x + branch in x's dtype, to which the branch is rounded; x itself without a branch."""
    branch = whole(branch)
    return x if branch is None else x + in_dtype(branch, x.dtype)


def is_observed(module: nn.Module) -> bool:
    """Return whether a call of the module does more than the forward of its class in hqsweep.

    True with hooks (FSDP2 sets some), after module.compile(), and for another forward, set on the module or in a
    derived class. KNOWN_HOOKS do not count.
    """
    known = module.__dict__.get(KNOWN_HOOKS, ())
    wrapped = is_compiled(module) or "forward" in module.__dict__
    wrapped = wrapped or not type(module).forward.__module__.startswith(OWN)
    return wrapped or any(key not in known for table in hook_tables(module) for key in table) or has_global_hooks()


class AddsBranch(nn.Module):
    """A module that begins with a norm. A subclass has _added(x, branch, *options) -> (x + branch, output, ...).

    The output may be a Branch.
    """

    def added(self, x: Tensor, branch: Branch, *options: Any) -> tuple[Any, ...]:
        """Return (x + branch, self(x + branch, *options)), with the sum of add_branch, in one pass with the norm.

        Several results of a module follow the sum one by one. The output may be Summands. An observed module is
        called.
        """
        if not is_observed(self):
            return self._added(x, branch, *options)
        total = add_branch(x, branch)
        output = self(total, *options)
        return (total, *output) if isinstance(output, tuple) else (total, output)


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
