"""transformer_engine.pytorch.optimizers.FusedAdam: its arguments and defaults, on hqsweep.optim.FusedAdam."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep import optim
from hqsweep.compat.arguments import flag, one_of, refuse, shown
from hqsweep.errors import UserError

STATES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(optim.FusedAdam):
    """AdamW without weight decay and without masters by default. Masters and moments are float32.

    capturable and store_param_remainders change no number and have no effect; after a capture another rate is set by
    set_lr(). UserError for other dtypes of masters and moments, amsgrad, bias_correction=False, use_decoupled_grad,
    weight decay without adam_w_mode, and for parameters below float32 with master_weights=False.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter | dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse("FusedAdam", {"amsgrad": amsgrad, "use_decoupled_grad": use_decoupled_grad})
        refuse("FusedAdam", {"bias_correction": bias_correction}, {"bias_correction": True})
        refuse("FusedAdam", {"set_grad_none": set_grad_none})
        dtypes = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        for name, dtype in (dtypes | {"master_weight_dtype": master_weight_dtype}).items():
            one_of("FusedAdam", name, dtype, (torch.float32,))
        for name, value in {"capturable": capturable, "store_param_remainders": store_param_remainders}.items():
            flag("FusedAdam", name, value)
        self.adam_w_mode = flag("FusedAdam", "adam_w_mode", adam_w_mode)
        masters = flag("FusedAdam", "master_weights", master_weights)
        super().__init__(params, lr, betas, eps, weight_decay, master_weights=masters)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"adam_w_mode": self.adam_w_mode}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. UserError for what its parameters do not take here."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["weight_decay"] and not self.adam_w_mode:
            raise UserError(
                f"FusedAdam: adam_w_mode=False with weight_decay={shown(group['weight_decay'])} adds decay to"
                " gradients, which has no counterpart here; give weight_decay=0, or leave adam_w_mode out"
            )
        low = [p for p in group["params"] if p.dtype not in (torch.float32, torch.float64)]
        if low and not self.master_weights:
            raise UserError(
                f"FusedAdam: {len(low)} parameters are {low[0].dtype}, and without masters their moments would be, too;"
                " give master_weights=True"
            )

    def get_unscaled_state(self, param: nn.Parameter, state_name: str) -> Tensor:
        """The float32 state of a parameter: exp_avg, exp_avg_sq or master_param. UserError for another name, and before
        the first step."""
        one_of("FusedAdam", "state_name", state_name, STATES)
        if state_name not in self.state[param]:
            raise UserError(f"FusedAdam: a parameter {list(param.shape)} has no {state_name}; its first step makes it")
        return self.state[param][state_name]

    def set_scaled_state(self, param: nn.Parameter, state_name: str, unscaled_state: Tensor) -> None:
        """Write a state of a parameter. UserError as for get_unscaled_state()."""
        with torch.no_grad():
            self.get_unscaled_state(param, state_name).copy_(unscaled_state)
