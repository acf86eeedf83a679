"""Optimizers by TransformerEngine's names."""

from hqsweep.compat.optimizers.fused_adam import FusedAdam
from hqsweep.compat.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
