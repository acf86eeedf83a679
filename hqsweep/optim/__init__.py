"""FusedAdam, AdamW on FP32 masters of bf16 and quantized parameters, and gradients that are summed in FP32."""

from hqsweep.optim.adam import MASTER, FusedAdam
from hqsweep.optim.parameters import gradient, use_main_grads

__all__ = ["MASTER", "FusedAdam", "gradient", "use_main_grads"]
