"""What modules of several linears share: the dtype of a call, and the ranks that each linear is shared by."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.compat.modules.activation_dtype import InActivationDtype, activations
from hqsweep.compat.modules.parts import ranks_of
from hqsweep.errors import UserError

SHARED = (
    "tp_group", "tp_size", "sequence_parallel", "fuse_wgrad_accumulation", "params_dtype", "bias",
)  # fmt: skip
"""The arguments that a module hands on to its linears."""


class OverRanks(TakesKeys):
    """A module of several linears that ranks may share. Each call is in the dtype of its input."""

    def take(self, x: Tensor) -> Tensor:
        """Return x in the dtype of a call with it, and give all modules inside that dtype."""
        x = activations(type(self).__name__, x)
        self.set_dtype(x.dtype)
        return x

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the calls that follow."""
        for child in self.children():
            if isinstance(child, InActivationDtype | OverRanks):
                child.set_dtype(dtype)

    def check_ranks(self, arguments: Mapping[str, Any]) -> None:
        """UserError for ranks that no argument says how to use."""
        kind = type(self).__name__
        self.ranks = ranks_of(arguments["tp_size"], arguments["tp_group"])
        if self.ranks > 1 and not arguments["set_parallel_mode"]:
            raise UserError(f"{kind}: tp_size={self.ranks} without set_parallel_mode; give set_parallel_mode=True")

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the module. UserError for another number of ranks than tp_size."""
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw all weights again, and reset biases and norms. defer_init: do nothing."""
        for child in () if defer_init else self.children():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()


def shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that linears take."""
    return {name: given[name] for name in SHARED}
