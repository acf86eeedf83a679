"""FusedAdam: AdamW on FP32 masters, whose result is written back to bf16 or quantized parameters.

The arithmetic is torch's own (torch.optim.adamw, by its foreach or fused kernels), so that masters follow
torch.optim.AdamW to the byte.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adamw import adamw

from hqsweep.errors import UserError
from hqsweep.quant.tensor import HybridQuantizedTensor

MASTER = "master_param"
OWN_MASTERS = (torch.float32, torch.float64)
"""dtypes of plain parameters that are updated as they are."""


class FusedAdam(torch.optim.AdamW):
    """AdamW with FP32 masters; arguments and state are those of torch.optim.AdamW.

    Plain FP32 and FP64 parameters are updated as they are. For every other parameter state["master_param"] holds an
    FP32 master, made at its first step: from the preserved initial value of a quantized parameter, which is then
    cleared, or else from dequantize(). After each step the master is rounded into the parameter (quantize_, keyed by
    the next step of its key). From the first step on the master is the weight: anything else that is written to the
    parameter is overwritten, so a checkpoint is loaded into the model and the optimizer.

    The gradient is param.main_grad where there is one, else param.grad; moments have the master's dtype. foreach and
    fused choose torch's kernels: by default the fused one where all is on CUDA, elsewhere as AdamW does.
    master_weights=False updates plain low-precision parameters in place.

    The fused kernel reads the learning rate and counts the steps on the device and nothing waits for it, so that a CUDA
    graph can hold a step; what replays one gives rates by set_lr().

    Raises UserError for quantized parameters with master_weights=False, and for a parameter with both a grad and a
    main_grad.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: bool = True,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self.master_weights = master_weights
        self._rates: dict[int, tuple[Tensor, float]] = {}
        super().__init__(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; UserError for quantized parameters without masters."""
        _uncompiled(super().add_param_group)(param_group)
        quantized = [p for p in self.param_groups[-1]["params"] if isinstance(p, HybridQuantizedTensor)]
        if quantized and not self.master_weights:
            raise UserError(
                f"FusedAdam: {len(quantized)} parameters are quantized, such as one in {quantized[0].quantizer}; they"
                " cannot be updated without FP32 masters, so leave master_weights=True"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all(self._gradients())
        return loss

    def set_lr(self, lr: float) -> None:
        """Give every group this learning rate, which CUDA graphs that hold a step read, too."""
        for index, group in enumerate(self.param_groups):
            group["lr"] = lr
            if index in self._rates:
                self._rate(index)

    @torch.no_grad()
    def clip_and_step(self, max_norm: float, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """A step of the gradients times min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ scales
        them; returns their norm, float32 [].

        The fused kernel divides by the inverse as it reads a gradient, and stores the quotient: one pass less.
        parameters: in whose order the norms of the gradients are summed, by default that of the groups.
        """
        if parameters is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
        parameters, gradients = list(parameters), self._gradients()
        if all(self._is_fused(group) for group in self.param_groups):
            every = {p: g for grads in gradients for p, g in grads.items()}
            norm = get_total_norm([every[p] for p in parameters if p in every])
            self._update_all(gradients, ((norm + 1e-6) / max_norm).clamp(min=1.0))
            return norm
        norm = get_total_norm([g for p in parameters if (g := gradient(p)) is not None])
        clip_grads_with_norm_(parameters, max_norm, norm)
        held = [p.main_grad for p in parameters if getattr(p, "main_grad", None) is not None]
        if held:
            torch._foreach_mul_(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._update_all(self._gradients())
        return norm

    def _gradients(self) -> list[dict[Tensor, Tensor]]:
        """Of each group its parameters and their gradients in the dtype of their updates, as far as there are any."""
        groups = (group["params"] for group in self.param_groups)
        return [{p: g.to(self._dtype(p)) for p in params if (g := gradient(p)) is not None} for params in groups]

    def _update_all(self, gradients: list[dict[Tensor, Tensor]], divisor: Tensor | None = None) -> None:
        """One update; divisor: what gradients of fused groups are divided by."""
        for index, grads in enumerate(gradients):
            if grads:
                self._update(index, grads, divisor)

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernel updates a group."""
        if group["fused"] is not None or group["foreach"] is not None:
            return bool(group["fused"])
        return all(p.is_cuda for p in group["params"])

    def _rate(self, index: int) -> float | Tensor:
        """The learning rate of a group; on a GPU as it lies there, float32, in memory that stays and takes the group's
        own rate unless a graph is captured."""
        group = self.param_groups[index]
        rate, first = group["lr"], group["params"][0]
        if isinstance(rate, Tensor) or not first.is_cuda or first.dtype == torch.float64:
            return rate
        held, value = self._rates.get(index, (None, None))
        if held is None or held.device != first.device:
            held = torch.empty((), dtype=torch.float32, device=first.device)
        elif value == rate or torch.cuda.is_current_stream_capturing():
            return held
        self._rates[index] = held.fill_(rate), rate
        return held

    def _update(self, index: int, grads: dict[Tensor, Tensor], divisor: Tensor | None) -> None:
        group = self.param_groups[index]
        fused = self._is_fused(group)
        states = [self._state(p, fused) for p in grads]
        masters = [self.master_param(p) for p in grads]
        adamw(
            masters,
            list(grads.values()),
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=fused,
            lr=self._rate(index) if fused else group["lr"],
            grad_scale=divisor,
            **{name: group[name] for name in ("capturable", "differentiable")},
            **{name: group[name] for name in ("amsgrad", "weight_decay", "eps", "maximize")},
            beta1=group["betas"][0],
            beta2=group["betas"][1],
        )
        if fused:  # whose kernel leaves versions as they are, by which kept operands of weights are known to be old
            torch.autograd.graph.increment_version(masters)
        written = [(p, master) for p, master in zip(grads, masters, strict=True) if p is not master]
        plain = [pair for pair in written if not isinstance(pair[0], HybridQuantizedTensor)]
        if plain:
            torch._foreach_copy_(*map(list, zip(*plain, strict=True)))
        for p, master in written:
            if isinstance(p, HybridQuantizedTensor):
                p.quantize_(master)

    def _dtype(self, p: Tensor) -> torch.dtype:
        """dtype of the update: the master's."""
        return torch.float32 if self.master_weights and not _is_own_master(p) else p.dtype

    def _state(self, p: Tensor, fused: bool) -> dict[str, Tensor]:
        """The state of one parameter, made when it is first asked for. The fused kernel counts steps on the device, the
        others on the CPU."""
        state, master = self.state[p], self.master_param(p)
        device = p.device if fused else torch.device("cpu")
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        elif state["step"].device != device:  # of a checkpoint that another kernel wrote
            state["step"] = state["step"].to(device)
        if master is not p and MASTER not in state:
            state[MASTER] = master
            if isinstance(p, HybridQuantizedTensor):
                p.clear_high_precision_init_val()
        return state

    @torch.no_grad()
    def master_param(self, p: Tensor) -> Tensor:
        """The FP32 master of a parameter, or what it would start from; p itself where it needs none."""
        if self.master_weights and p in self.state and MASTER in self.state[p]:
            return self.state[p][MASTER]
        if not self.master_weights or _is_own_master(p):
            return p
        if isinstance(p, HybridQuantizedTensor):
            preserved = p.get_high_precision_init_val()
            p = p.dequantize(torch.float32) if preserved is None else preserved.to(p.device)
        return p.detach().to(torch.float32, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch has it."""
        return _uncompiled(super().state_dict)()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but masters and moments stay FP32: torch would round them to the parameters' dtype.

        Masters that the state lacks, as one of torch.optim.AdamW does, are made at the next step.
        """
        _uncompiled(super().load_state_dict)(state_dict)
        names = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for name, p in zip(names, params, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                device, dtype = self.state[p][key].device, value.dtype if key == "step" else self._dtype(p)
                self.state[p][key] = value.detach().to(device, dtype, copy=True)
            if MASTER in self.state[p] and isinstance(p, HybridQuantizedTensor):
                p.clear_high_precision_init_val()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every grad, and zero every main_grad in place."""
        _uncompiled(super().zero_grad)(set_to_none)
        held = [p.main_grad for group in self.param_groups for p in group["params"] if hasattr(p, "main_grad")]
        if held:
            torch._foreach_zero_(held)


def _uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizer, without its decorator in a process that does not compile: to keep torch.compile
    out of the method, the decorator imports that first, which takes about as long as importing torch."""
    plain = getattr(method, "__wrapped__", None)
    return method if plain is None or "torch._dynamo" in sys.modules else partial(plain, method.__self__)


def _is_own_master(p: Tensor) -> bool:
    return p.dtype in OWN_MASTERS and not isinstance(p, HybridQuantizedTensor)


def gradient(p: Tensor) -> Tensor | None:
    """main_grad where there is one, else grad; UserError where there are both, since one of them would be lost."""
    main_grad = getattr(p, "main_grad", None)
    if main_grad is not None and p.grad is not None:
        raise UserError(
            f"a parameter of shape {tuple(p.shape)} has both grad and main_grad; optim.use_main_grads adds each grad to"
            " main_grad"
        )
    return p.grad if main_grad is None else main_grad


def use_main_grads(module: nn.Module) -> None:
    """Give every parameter an FP32 main_grad of zeros, to which each backward adds, and no grad.

    Modules with fuse_wgrad_accumulation add the FP32 result of wgrad; for other parameters autograd's grad is added
    and dropped.
    """
    for part in module.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True
    for p in _trained(module.parameters()):
        p.main_grad = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
        p.register_post_accumulate_grad_hook(_accumulate)


def _trained(params: Iterable[Tensor]) -> Iterable[Tensor]:
    return (p for p in params if p.requires_grad)


def _accumulate(p: Tensor) -> None:
    if p.grad is not None:  # a module that adds to main_grad gives autograd none
        p.main_grad.add_(p.grad)
        p.grad = None
