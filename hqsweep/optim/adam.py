"""FusedAdam: AdamW on FP32 masters. Its results are written back to bf16 or quantized parameters.

The arithmetic is torch's own (torch.optim.adamw), so that masters equal torch.optim.AdamW's to the byte. On CUDA
one kernel (hqsweep.ops.elementwise) reads and writes each array once, with the arithmetic of torch on a CPU.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hqsweep.errors import UserError
from hqsweep.nn.core.parameter import note_update
from hqsweep.ops.elementwise import adamw_
from hqsweep.ops.library import has_kernels
from hqsweep.optim.parameters import Rounded, clip_, clip_factor, gradient, norm_of, values_of
from hqsweep.parallel.shards.shard_agree import quantize_shards_
from hqsweep.parallel.wire.local import group_of_shards, is_spread, local, part_as, spread_like
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import foreach_add_, foreach_copy_, foreach_zero_

MASTER = "master_param"
Norm = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(parameters, their gradients) -> the norm [] of all gradients."""
OWN_MASTERS = (torch.float32, torch.float64)
"""dtypes of plain parameters that are updated without a master."""


class FusedAdam(torch.optim.AdamW):
    """AdamW with FP32 masters. Arguments and state are as in torch.optim.AdamW.

    Plain FP32 and FP64 parameters are updated directly. For every other parameter state["master_param"] holds an FP32
    master. The parameter's first step makes it from the preserved initial value of a quantized parameter, which is then
    cleared, or else from dequantize(). After each step the master is rounded into the parameter (quantize_, under the
    next step of its key). From the first step on, the master is the weight.

    Where load_state_dict, copy_ or others write values to a parameter, the next step makes a new master from them and
    keeps the moments, like torch. A CUDA graph that holds a step does not notice such writes, and writes to the memory
    of `p.data` of a plain parameter are never noticed. A state that is loaded has its masters, so load the model from
    the same checkpoint. Copies and pickles, alone and with the model, continue like the original.

    The gradient is param.main_grad where there is one, else param.grad. Moments have the master's dtype. foreach and
    fused choose torch's kernels. Without them adamw_ updates groups of FP32 masters on CUDA; torch's fused kernel
    updates other groups that lie on CUDA; AdamW's default updates the rest. adamw_ takes no amsgrad, no maximize, no
    differentiable, no rate in a tensor, and no parameters with gaps. master_weights=False updates plain low-precision
    parameters in place.

    Each rank updates its part of a DTensor, such as fully_shard makes. Masters and moments are DTensors with the
    parameter's placements, so that torch.distributed.checkpoint saves and loads them. Kernels on CUDA read the learning
    rate and count the steps on the device, and nothing waits for them, so a CUDA graph can hold a step. To replay it at
    another rate call set_lr().

    Raises UserError for quantized parameters with master_weights=False, for a parameter with both a grad and a
    main_grad, and for masters of a loaded state that do not match the parameters.
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
        self._rounded = Rounded()
        super().__init__(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)

    def __getstate__(self) -> dict[str, Any]:
        self._renew_masters()
        return {**super().__getstate__(), "master_weights": self.master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, or of another optimizer, as torch's load_state_dict gives it."""
        super().__setstate__(state)
        for name, value in {"master_weights": True, "_rates": {}, "_rounded": Rounded()}.items():
            self.__dict__.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch. UserError for quantized parameters without masters."""
        _uncompiled(super().add_param_group)(param_group)
        quantized = [local(p) for p in self.param_groups[-1]["params"] if _is_held(p)]
        if quantized and not self.master_weights:
            raise UserError(
                f"FusedAdam: {len(quantized)} parameters are quantized, such as one in {quantized[0].quantizer}; they"
                " cannot be updated without FP32 masters, so leave master_weights=True"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all(self._gradients())
        return loss

    def set_lr(self, lr: float) -> None:
        """Give every group this learning rate. CUDA graphs that hold a step read it, too."""
        for index, group in enumerate(self.param_groups):
            group["lr"] = lr
            if index in self._rates:
                self._rate(index, self._rates[index][0].dtype)

    @torch.no_grad()
    def clip_and_step(
        self, max_norm: float, parameters: Iterable[Tensor] | None = None, norm: Norm | None = None
    ) -> Tensor:
        """Step with the gradients times min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ scales
        them.

        Returns the norm, float32 [], which counts DTensors over all ranks. adamw_ multiplies a gradient as it reads it,
        and does not change it; elsewhere gradients are scaled in place.

        parameters: the order in which norms of gradients are added; default: the order of the groups. norm: computes
        the norm of these parameters' gradients together with gradients of other ranks; default: of these alone.
        """
        if parameters is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
        parameters = list(parameters)
        if all(map(self._is_own, self.param_groups)):
            gradients = self._gradients()
            every = {p: g for grads in gradients for p, g in grads.items()}
            total = _norm({p: spread_like(p, every[p]) for p in parameters if p in every}, norm)
            self._update_all(gradients, clip_factor(total, max_norm))
            return total
        own = {p: g for p in parameters if (g := gradient(p)) is not None}
        total = _norm(own, norm)
        clip_(own.values(), max_norm, total)
        self._update_all(self._gradients())
        return total

    def _gradients(self) -> list[dict[Tensor, Tensor]]:
        """For each group: parameter -> this rank's part of its gradient, in the dtype of its update, if it has a
        gradient."""
        self._renew_masters()
        groups = (group["params"] for group in self.param_groups)
        return [
            {p: part_as(p, g).to(self._dtype(p)) for p in params if (g := gradient(p)) is not None} for params in groups
        ]

    def _update_all(self, gradients: list[dict[Tensor, Tensor]], factor: Tensor | None = None) -> None:
        """Update all groups once. factor: multiplies the gradients of groups that adamw_ updates."""
        self._rounded.check_loaded(self._masters_of(p for grads in gradients for p in grads))
        written: dict[Tensor, Tensor] = {}
        for index, grads in enumerate(gradients):
            if grads:
                written |= self._update(index, grads, factor)
        _quantize({p: master for p, master in written.items() if _is_held(p)})
        for p, master in self._masters_of(written).items():
            self._rounded.note(p, master)

    def _masters_of(self, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Parameter -> its master, for parameters that have one."""
        return {p: self.state[p][MASTER] for p in params if MASTER in self.state.get(p, ())}

    @torch.no_grad()
    def _renew_masters(self, params: Iterable[Tensor] | None = None) -> None:
        """Make new masters for parameters that other code has written; by default for all."""
        for p, master in self._masters_of(self.state if params is None else params).items():
            if self._rounded.is_stale(p, master):
                local(master).copy_(values_of(p))
                self._rounded.note(p, master)

    def _is_own(self, group: dict[str, Any]) -> bool:
        """Whether adamw_ updates a group."""
        if group["fused"] is not None or group["foreach"] is not None or not has_kernels("cuda"):
            return False
        if any(group[name] for name in ("amsgrad", "maximize", "differentiable")):
            return False
        if any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"])):
            return False
        parts = [local(p) for p in group["params"]]
        one_gpu = len({part.device for part in parts}) == 1 and parts[0].is_cuda
        return one_gpu and all(self._dtype(part) == torch.float32 and part.is_contiguous() for part in parts)

    def _is_fused(self, group: dict[str, Any]) -> bool:
        """Whether torch's fused kernel updates a group that adamw_ does not update."""
        if group["fused"] is not None or group["foreach"] is not None:
            return bool(group["fused"])
        return all(p.is_cuda for p in group["params"])

    def _rate(self, index: int, dtype: torch.dtype) -> float | Tensor:
        """The learning rate of a group. On a GPU it is a tensor of this dtype at a fixed address.

        The tensor takes the group's present rate, unless a graph is captured.
        """
        group = self.param_groups[index]
        rate, first = group["lr"], group["params"][0]
        if isinstance(rate, Tensor) or not first.is_cuda or first.dtype == torch.float64:
            return rate
        held, value = self._rates.get(index, (None, None))
        if held is None or (held.device, held.dtype) != (first.device, dtype):
            held = torch.empty((), dtype=dtype, device=first.device)
        elif value == rate or torch.cuda.is_current_stream_capturing():
            return held
        self._rates[index] = held.fill_(rate), rate
        return held

    def _update(self, index: int, grads: dict[Tensor, Tensor], factor: Tensor | None) -> dict[Tensor, Tensor]:
        """Update the parameters of a group, except held ones. Returns parameter -> master, or this rank's part of
        it."""
        group = self.param_groups[index]
        own, fused = self._is_own(group), self._is_fused(group)
        states = [self._state(p, own or fused) for p in grads]
        masters = [local(self.master_param(p)) for p in grads]
        averages = [[local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")]
        steps, options = [state["step"] for state in states], {name: group[name] for name in ("weight_decay", "eps")}
        if own:
            foreach_add_(steps, 1)
            rule = {"lr": self._rate(index, torch.float64), "factor": factor, "betas": group["betas"]}
            adamw_(masters, [gradient.contiguous() for gradient in grads.values()], *averages, steps, **rule, **options)
        else:
            adamw(
                masters,
                list(grads.values()),
                *averages,
                [],
                steps,
                foreach=group["foreach"],
                fused=fused,
                lr=self._rate(index, torch.float32) if fused else group["lr"],
                **{name: group[name] for name in ("capturable", "differentiable", "amsgrad", "maximize")},
                **options,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
            )
        if own or fused:  # kernels do not change versions, by which old cached operands are found
            torch.autograd.graph.increment_version(masters)
        updated = dict(zip(grads, masters, strict=True))
        write_plain(updated)
        return updated

    def _dtype(self, p: Tensor) -> torch.dtype:
        """The dtype of the update, which is the master's."""
        return torch.float32 if self.master_weights and not _is_own_master(p) else p.dtype

    def _state(self, p: Tensor, counts_on_device: bool) -> dict[str, Tensor]:
        """The state of one parameter, made on its first use. For foreach kernels and single tensors, steps are on the
        CPU."""
        state, master = self.state[p], self.master_param(p)
        device = p.device if counts_on_device else torch.device("cpu")
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        elif state["step"].device != device:  # another kernel wrote the checkpoint
            state["step"] = state["step"].to(device)
        if master is not p and MASTER not in state:
            state[MASTER] = master
            if _is_held(p):
                local(p).clear_high_precision_init_val()
        return state

    @torch.no_grad()
    def master_param(self, p: Tensor) -> Tensor:
        """Return the FP32 master of a parameter, or its future initial value; a DTensor for a DTensor.

        p itself if it needs no master.
        """
        if self.master_weights and p in self.state and MASTER in self.state[p]:
            self._renew_masters([p])
            return self.state[p][MASTER]
        if not self.master_weights or _is_own_master(p):
            return p
        part = local(p)
        if isinstance(part, HybridQuantizedTensor):
            preserved = part.get_high_precision_init_val()
            part = part.dequantize(torch.float32) if preserved is None else preserved.to(p.device)
        return spread_like(p, part.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format))

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form."""
        self._renew_masters()
        return _uncompiled(super().state_dict)()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch, but keep masters and moments in FP32; torch would round them to the parameters' dtype.

        Masters that the state lacks, such as in a state of torch.optim.AdamW, are made at the next step.
        """
        _uncompiled(super().load_state_dict)(state_dict)
        names = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for name, p in zip(names, params, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                device, dtype = self.state[p][key].device, value.dtype if key == "step" else self._dtype(p)
                self.state[p][key] = value.detach().to(device, dtype, copy=True)
            if MASTER in self.state[p] and _is_held(p):
                local(p).clear_high_precision_init_val()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every grad, and zero every main_grad in place."""
        _uncompiled(super().zero_grad)(set_to_none)
        held = [p.main_grad for group in self.param_groups for p in group["params"] if hasattr(p, "main_grad")]
        if held:
            foreach_zero_([local(main_grad) for main_grad in held])


def _uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizer, without its decorator where this process does not compile.

    The decorator keeps torch.compile out of the method. It imports torch.compile, which takes as long as importing
    torch.
    """
    plain = getattr(method, "__wrapped__", None)
    return method if plain is None or "torch._dynamo" in sys.modules else partial(plain, method.__self__)


def _norm(gradients: dict[Tensor, Tensor], norm: Norm | None) -> Tensor:
    every = list(gradients.values())
    return norm_of(every) if norm is None else norm(list(gradients), every)


def write_plain(masters: Mapping[Tensor, Tensor]) -> None:
    """Copy masters into plain parameters. masters: parameter -> its master, or this rank's part of it."""
    plain = [(local(p), m) for p, m in masters.items() if not (local(p) is m or _is_held(p))]
    if plain:
        foreach_copy_(*map(list, zip(*plain, strict=True)))
    spread = [p for p in masters if is_spread(p)]
    if spread:  # the writes to parts did not count
        torch.autograd.graph.increment_version(spread)
        note_update()


def _is_held(p: Tensor) -> bool:
    """Whether a parameter, or this rank's part of it, is held quantized."""
    return isinstance(local(p), HybridQuantizedTensor)


def _is_own_master(p: Tensor) -> bool:
    return p.dtype in OWN_MASTERS and not _is_held(p)


def _quantize(masters: dict[Tensor, Tensor]) -> None:
    """Write masters into held parameters. The shards of a group of ranks take one exchange."""
    shared: dict[Any, list[Tensor]] = {}
    for p in masters:
        shared.setdefault(group_of_shards(p), []).append(p)
    for group, params in shared.items():
        quantize_shards_([local(p) for p in params], [masters[p] for p in params], group=group)
