"""Grouped linears over ranks: ranks share the features of each expert, or the experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.nn.core.parameter import link_states
from hqsweep.nn.core.wire import Codes
from hqsweep.nn.grouped import ExpertParameters, GroupedBase
from hqsweep.nn.grouped_linear import GroupedLinear
from hqsweep.ops.splits import Splits
from hqsweep.parallel.shared.call import LinearShare, SharedCall
from hqsweep.parallel.shared.linear_function import Handover, SharedLinearFunction
from hqsweep.parallel.shared.tokens import local
from hqsweep.parallel.wire.local import is_spread
from hqsweep.parallel.wire.local import local as stored


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedExperts:
    """How ranks share a grouped linear (hqsweep.nn.core.wire.ExpertRanks)."""

    features: LinearShare | None = None
    """How ranks share the features of each expert; None: each rank has all."""
    mean_over: int = 1
    """Gradients of parameters are divided by this number of ranks."""

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that share the features."""
        return None if self.features is None else self.features.group

    def own(self, grouped: GroupedLinear) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        weights = grouped.weights
        if is_spread(weights[0]):
            link_states(list(map(stored, weights)), grouped.states)  # and not a view of the part
        return list(map(local, weights)), list(map(local, grouped.biases))

    def product(
        self, grouped: GroupedBase, x: Tensor, splits: Splits, parameters: ExpertParameters, codes: Codes | None
    ) -> Tensor:
        exchange = None if self.features is None else self.features.exchange(x.shape[:-1])
        call = SharedCall(**grouped.expert_facts(splits, x.device), exchange=exchange, mean_over=self.mean_over)
        weights, biases = parameters
        return SharedLinearFunction.apply(x, call, Handover(codes=codes), len(weights), None, *weights, *biases)

    def __deepcopy__(self, memo: Any) -> "SharedExperts":
        return self  # a group has no copies


def share_features(grouped: GroupedBase, share: LinearShare) -> None:
    """Reduce a grouped linear to this rank's part of every expert: output features ("column") or input features
    ("row").

    Every rank has all rows. Sums over ranks are sums over all features.
    """
    ranks = share.group.size()
    if share.mode == "column":
        grouped.out_features //= ranks
    else:
        grouped.in_features //= ranks
    grouped.parallel = SharedExperts(features=share)
    grouped.resize()
