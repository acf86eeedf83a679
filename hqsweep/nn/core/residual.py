"""The residual stream between modules: the sum of a branch is left to the norm that reads it next, in one pass.

Modules hand on (x, branch), where x + branch is the stream and branch, or None, the output of the module before. Of
ranks that share that module the branch may be a sum that is left to the same norm, too: Summands.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hqsweep.nn.core.wire import Summands
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.torch_private import has_global_hooks, hook_tables, is_compiled

RESIDUAL = "_residual"
"""The name of the method by which layers hand on (x, branch)."""
KNOWN_HOOKS = "_hqsweep_known_hooks"
"""The attribute of a layer for the ids of hooks that run around RESIDUAL as they do around its forward."""
OWN = "hqsweep."
"""What the modules begin with whose classes have such a method beside their forward."""


Branch = Tensor | Summands | None


class _Sum(Function):
    """The sum of Summands, whose gradient is that of this rank's."""

    @staticmethod
    def forward(ctx, own: Tensor, summands: Summands) -> Tensor:
        return summands.total()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def whole(branch: Branch) -> Tensor | None:
    """The branch as one tensor."""
    return branch if branch is None or isinstance(branch, Tensor) else _Sum.apply(branch.own, branch)


def add_branch(x: Tensor, branch: Branch) -> Tensor:
    """x + branch in x's dtype, to which the branch is rounded; x itself without one."""
    branch = whole(branch)
    return x if branch is None else x + in_dtype(branch, x.dtype)


def is_observed(module: nn.Module) -> bool:
    """Whether a call of the module is more than the forward of its class in hqsweep: it has hooks, as FSDP2 sets them,
    is compiled by module.compile(), or has another forward, of its own or of a class derived elsewhere. KNOWN_HOOKS
    do not count."""
    known = module.__dict__.get(KNOWN_HOOKS, ())
    wrapped = is_compiled(module) or "forward" in module.__dict__
    wrapped = wrapped or not type(module).forward.__module__.startswith(OWN)
    return wrapped or any(key not in known for table in hook_tables(module) for key in table) or has_global_hooks()


class AddsBranch(nn.Module):
    """A module that begins with a norm; a subclass has _added(x, branch, *options) -> (x + branch, output, ...), where
    the output may be a Branch."""

    def added(self, x: Tensor, branch: Branch, *options: Any) -> tuple[Any, ...]:
        """(x + branch, self(x + branch, *options)) with the sum as add_branch gives it, in one pass with the norm; the
        results of a module that has several stand one by one, and the output may be left as Summands. An observed
        module is called as it is."""
        if not is_observed(self):
            return self._added(x, branch, *options)
        total = add_branch(x, branch)
        output = self(total, *options)
        return (total, *output) if isinstance(output, tuple) else (total, output)
