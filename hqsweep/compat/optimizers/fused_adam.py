"""transformer_engine.pytorch.optimizers.FusedAdam: its arguments and defaults, on hqsweep.optim.FusedAdam."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep import optim
from hqsweep.compat.arguments import flag, one_of, refuse
from hqsweep.compat.optimizers.packed import packed, unpacked
from hqsweep.errors import UserError
from hqsweep.optim.parameters import gradient
from hqsweep.parallel.wire.local import local, part_as
from hqsweep.quant.tensor import HybridQuantizedTensor

STATES = ("exp_avg", "exp_avg_sq", "master_param")
UNCORRECTED = 2.0**40
"""A count of steps after which no bias is left to correct: powers of betas below 0.99999999 are 0."""


class NeedsMasters(UserError, RuntimeError):
    """Held weights come without masters. It is a RuntimeError, as in TransformerEngine."""


class FusedAdam(optim.FusedAdam):
    """AdamW without weight decay and without masters by default.

    The update is computed in float32, by torch's arithmetic, for parameters of any dtype; masters and moments are kept
    in the dtypes that are asked for (torch.uint8: FP8). adam_w_mode=False adds weight decay to gradients, as
    torch.optim.Adam does. use_decoupled_grad reads param.decoupled_grad. Each group counts its steps in "step".

    capturable has torch's GradScaler leave float16 gradients to step(); after a capture another rate is set by
    set_lr(). store_param_remainders has no effect. UserError for amsgrad, for other dtypes of states, and for held
    weights without master_weights.
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
        refuse("FusedAdam", {"amsgrad": amsgrad, "set_grad_none": set_grad_none})
        one_of("FusedAdam", "master_weight_dtype", master_weight_dtype, (torch.float32, torch.float16))
        for name, dtype in {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}.items():
            one_of("FusedAdam", name, dtype, (torch.float32, torch.float16, torch.bfloat16, torch.uint8))
        for name, value in {"capturable": capturable, "store_param_remainders": store_param_remainders}.items():
            flag("FusedAdam", name, value)
        if capturable:
            self._step_supports_amp_scaling = True  # GradScaler asks for it
        self.adam_w_mode = flag("FusedAdam", "adam_w_mode", adam_w_mode)
        self.bias_correction = flag("FusedAdam", "bias_correction", bias_correction)
        self.use_decoupled_grad = flag("FusedAdam", "use_decoupled_grad", use_decoupled_grad)
        if isinstance(master_weights, list | tuple):  # of masters, which TransformerEngine makes itself, too
            master_weights = bool(master_weights)
        self.keeps_masters = flag("FusedAdam", "master_weights", master_weights)
        self.dtypes = dict(zip(STATES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        super().__init__(params, lr, betas, eps, weight_decay, master_weights=True)

    def __getstate__(self) -> dict[str, Any]:
        names = ("adam_w_mode", "bias_correction", "use_decoupled_grad", "keeps_masters", "dtypes")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. UserError for held weights without masters."""
        super().add_param_group(param_group)
        held = [p for p in self.param_groups[-1]["params"] if isinstance(local(p), HybridQuantizedTensor)]
        if held and not self.keeps_masters:
            raise NeedsMasters(
                f"FusedAdam: {len(held)} parameters are quantized, such as one in {local(held[0]).quantizer}; they"
                " cannot be updated without masters, so give master_weights=True"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None, **options: Any) -> Tensor | None:
        """Update every parameter that has a gradient. Returns the closure's loss.

        Under GradScaler.step(optimizer) a capturable optimizer divides gradients itself, in place, by the scale
        (grad_scale), and changes nothing where one is not finite (found_inf). UserError for grad_scaler: call
        GradScaler.step(optimizer).
        """
        refuse("FusedAdam.step", options)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", None) is not None and self.found_inf.item():
            return loss
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        gradients = self._gradients()
        with self._in_float32(p for grads in gradients for p in grads):
            self._update_all(gradients)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or zero it; decoupled_grad with use_decoupled_grad."""
        super().zero_grad(set_to_none)
        for p in [p for group in self.param_groups for p in group["params"]] if self.use_decoupled_grad else []:
            if set_to_none:
                p.decoupled_grad = None
            elif getattr(p, "decoupled_grad", None) is not None:
                p.decoupled_grad.zero_()

    def get_unscaled_state(self, param: nn.Parameter, state_name: str) -> Tensor:
        """The float32 state of a parameter: exp_avg, exp_avg_sq or master_param. UserError for another name, and before
        the first step."""
        one_of("FusedAdam", "state_name", state_name, STATES)
        if state_name not in self.state[param]:
            raise UserError(f"FusedAdam: a parameter {list(param.shape)} has no {state_name}; its first step makes it")
        return unpacked(param, self.state[param][state_name])

    def set_scaled_state(self, param: nn.Parameter, state_name: str, unscaled_state: Tensor) -> None:
        """Write a state of a parameter, in float32. UserError as for get_unscaled_state()."""
        with torch.no_grad():
            state = self.get_unscaled_state(param, state_name).copy_(unscaled_state)
            self.state[param][state_name] = packed(param, state, self.dtypes[state_name])

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, in float32."""
        with self._in_float32(list(self.state)):
            found = super().state_dict()
            return found | {"state": {name: dict(state) for name, state in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of float32, into the dtypes of this optimizer."""
        super().load_state_dict(state_dict)
        with self._in_float32(list(self.state)):
            pass

    @contextmanager
    def _in_float32(self, params: Iterable[Tensor]) -> Iterator[None]:
        """All states of these parameters in float32 inside. Masters that are not kept are dropped afterwards."""
        params = list(params)
        for p in params:
            own = self.state.get(p, {})
            own.update({name: unpacked(p, own[name]) for name in STATES if name in own})
        yield
        for p in params:
            own = self.state.get(p, {})
            if not self.keeps_masters:
                own.pop("master_param", None)
            own.update({name: packed(p, own[name], self.dtypes[name]) for name in STATES if name in own})

    def _gradients(self) -> list[dict[Tensor, Tensor]]:
        self._renew_masters()
        read = (lambda p: getattr(p, "decoupled_grad", None)) if self.use_decoupled_grad else gradient
        groups = (group["params"] for group in self.param_groups)
        found = [{p: part_as(p, g).to(self._dtype(p)) for p in own if (g := read(p)) is not None} for own in groups]
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return found
        unscaled = [{p: g / scale.to(g.device) for p, g in own.items()} for own in found]
        for p in (p for own in found for p in own):
            read(p).div_(scale.to(p.device))
        return unscaled

    def _renew_masters(self, params: Iterable[Tensor] | None = None) -> None:
        if self.dtypes["master_param"] is torch.float32:  # others are rounded, and differ from what was written
            super()._renew_masters(params)

    def _update(self, index: int, grads: dict[Tensor, Tensor], factor: Tensor | None) -> dict[Tensor, Tensor]:
        group = self.param_groups[index]
        decay, steps = group["weight_decay"], {}
        if decay and not self.adam_w_mode:
            grads = {p: g.add(local(self.master_param(p)), alpha=decay) for p, g in grads.items()}
            group["weight_decay"] = 0.0
        if not self.bias_correction:
            kernel = self._is_own(group) or self._is_fused(group)
            steps = {p: self._state(p, kernel)["step"].clone() for p in grads}
            for p in grads:
                self.state[p]["step"].fill_(UNCORRECTED)
        try:
            return super()._update(index, grads, factor)
        finally:
            group["weight_decay"] = decay
            for p, count in steps.items():
                self.state[p]["step"].copy_(count + 1)
