"""transformer_engine.pytorch.optimizers.FusedSGD: its arguments and defaults, on torch.optim.SGD."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hqsweep.compat.arguments import flag, refuse
from hqsweep.errors import UserError
from hqsweep.parallel.wire.local import local
from hqsweep.quant.tensor import HybridQuantizedTensor


class FusedSGD(torch.optim.SGD):
    """torch.optim.SGD in its arguments and arithmetic, with the fused kernel on GPUs.

    materialize_master_grads has no effect. UserError for wd_after_momentum, for a missing rate, and for weights that
    are held quantized, which need the masters of FusedAdam.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter | dict[str, Any]],
        lr: float | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse("FusedSGD", {"wd_after_momentum": wd_after_momentum, "set_grad_none": set_grad_none})
        flag("FusedSGD", "materialize_master_grads", materialize_master_grads)
        if lr is None:
            raise UserError("FusedSGD: lr is missing")
        params = list(params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        every = [p for group in groups for p in group["params"]]
        held = [p for p in every if isinstance(local(p), HybridQuantizedTensor)]
        if held:
            raise UserError(
                f"FusedSGD: {len(held)} parameters are quantized, such as one in {local(held[0]).quantizer}; take"
                " FusedAdam with master_weights=True"
            )
        options = {"weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, lr, momentum, dampening, fused=_all_on_gpu(every) or None, **options)


def _all_on_gpu(params: Iterable[nn.Parameter]) -> bool:
    return all(p.is_cuda for p in params)
