"""OtherOptimizer: an optimizer of torch's kind, of any class, on FP32 masters of bf16 and quantized parameters."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.optim.adam import FusedAdam, write_plain
from hqsweep.parallel.wire.local import local

OTHER = "other"
"""The key, in state_dict(), of the state of the optimizer of that class."""


class OtherOptimizer(FusedAdam):
    """FusedAdam's masters, updated by the optimizer that build(groups, lr=...) returns.

    build gets {"params": masters, "weight_decay": ...} for each group with parameters, where a plain FP32 parameter is
    its own master. It is called before the first step, and again where other code has replaced a master. The learning
    rate of each group is written before each step. Gradients are clipped in place. A CUDA graph cannot hold a step.

    where: the words that begin an error. code: the code of the class, for checkpoints (models.build.code_of_modules).
    Raises UserError where build raises, returns something else, or returns an optimizer whose step needs a closure.
    """

    def __init__(self, params: Any, build: Callable[..., Any], *, where: str, code: str = "", **options: Any) -> None:
        self.build, self.where, self.code = build, where, code
        self._other: torch.optim.Optimizer | None = None
        self._loaded: dict[str, Any] | None = None
        super().__init__(params, **options)

    def _is_own(self, group: dict[str, Any]) -> bool:
        return False

    def _written(self, gradients: list[dict[Tensor, Tensor]], factor: Tensor | None) -> dict[Tensor, Tensor]:
        other = self._over_masters()
        grads = {p: grad for own in gradients for p, grad in own.items()}
        masters = {p: local(self.master_param(p)) for p in grads}
        before = {p: master.grad for p, master in masters.items()}  # of a plain parameter; it may have a main_grad
        for p, master in masters.items():
            master.grad = grads[p]
        for own, group in zip((g for g in self.param_groups if g["params"]), other.param_groups, strict=True):
            group["lr"] = own["lr"]
        try:
            other.step()
        finally:
            for p, master in masters.items():
                master.grad = before[p]
        torch.autograd.graph.increment_version(list(masters.values()))  # not every class of torch changes versions
        write_plain(masters)
        return masters

    def _over_masters(self) -> torch.optim.Optimizer:
        """The optimizer over the present masters, with the state of the one before, or the loaded one."""
        groups = []
        for group in (group for group in self.param_groups if group["params"]):
            masters = [self.master_param(p) for p in group["params"]]
            for p, master in zip(group["params"], masters, strict=True):
                self._keep_master(p, master)
                if master is not p:
                    self.state[p].setdefault("step", torch.zeros(()))  # without which torch's AdamW loads no state
            groups.append({"params": list(map(local, masters)), "weight_decay": group["weight_decay"]})
        now = [id(master) for group in groups for master in group["params"]]
        if self._other is not None:
            if now == [id(master) for group in self._other.param_groups for master in group["params"]]:
                return self._other
            self._loaded = self._other.state_dict()
        self._other = built(self.build, groups, self.param_groups[0]["lr"], self.where)
        if self._loaded is not None:
            _load(self._other, self._loaded)
            self._loaded = None
        return self._other

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the masters in torch's form, and under OTHER the state of the other optimizer, if it has
        one."""
        other = self._loaded if self._other is None else self._other.state_dict()
        return super().state_dict() | ({} if other is None else {OTHER: other})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != OTHER})
        self._other, self._loaded = None, state_dict.get(OTHER)


def built(build: Callable[..., Any], groups: list[dict[str, Any]], lr: float, where: str) -> torch.optim.Optimizer:
    """build(groups, lr=lr). UserError, which begins with `where`, unless that is an optimizer whose step() needs no
    argument. Another cause is the error's __cause__."""
    try:
        with torch.enable_grad():
            optimizer = build(groups, lr=lr)
    except (Exception, SystemExit) as error:
        why = " ".join(str(error).split()) or "no message"
        raise UserError(f"{where} raised {type(error).__name__}: {why}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{where} gave {type(optimizer).__name__}; it must give a torch.optim.Optimizer")
    needed = inspect.signature(optimizer.step).parameters.values()
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed):
        raise UserError(f"{where}: its step() needs an argument, and hqsweep calls it without one; give another class")
    return optimizer


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state. Tensors keep their dtypes, where torch would give them the dtype of the master."""
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for number, master in zip(numbers, masters, strict=True):
        for name, value in state["state"].get(number, {}).items():
            held = optimizer.state[master].get(name)
            if isinstance(value, Tensor) and isinstance(held, Tensor) and held.dtype != value.dtype:
                optimizer.state[master][name] = value.detach().to(held.device, copy=True)
