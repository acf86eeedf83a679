"""Optimizers beside AdamW on the same FP32 masters: SGD and Muon; and moments that are rounded after each step.

Muon is for matrices of hidden layers: the momentum's singular values are set near 1 by five steps of Newton and Schulz
in bfloat16 (Jordan et al. 2024), as torch.optim.Muon does it, with the rate times 0.2 sqrt(max(rows, columns)), so that
it takes AdamW's rate (Liu et al., arXiv:2502.16982).
"""

import math
from typing import Any

import torch
from torch import Tensor

from hqsweep.optim.adam import FusedAdam, write_plain
from hqsweep.parallel.wire.local import local

COEFFICIENTS, STEPS, SMALL = (3.4445, -4.7750, 2.0315), 5, 1e-7
RMS = 0.2
BLOCK = 128
"""Elements of a moment under one float32 scale."""
LARGEST, LEAST = 448.0, 2.0**-9
"""E4M3's largest number, and its smallest above 0."""


class RuledOptimizer(FusedAdam):
    """FusedAdam, whose groups may have another rule: group["rule"] is adamw (default), sgd or muon.

    momentum  of sgd and muon; their buffer is state["exp_avg"]
    moments   fp32; bf16 or fp8, whose values are rounded after each step and take the memory of FP32. fp8 has E4M3 with
              a float32 scale for each BLOCK elements, of the second moment its root, no part of which becomes 0

    sgd is torch.optim.SGD with its coupled weight decay; muon decays as AdamW does. Both take whole parameters, of one
    rank. A CUDA graph can hold a step.
    """

    def __init__(self, params: Any, *, momentum: float = 0.95, moments: str = "fp32", **options: Any) -> None:
        self.momentum, self.moments = momentum, moments
        super().__init__(params, **options)

    def _is_own(self, group: dict[str, Any]) -> bool:
        return group.get("rule", "adamw") == "adamw" and super()._is_own(group)

    def _update(self, index: int, grads: dict[Tensor, Tensor], factor: Tensor | None) -> dict[Tensor, Tensor]:
        group = self.param_groups[index]
        rule = group.get("rule", "adamw")
        updated = super()._update(index, grads, factor) if rule == "adamw" else self._by_rule(index, grads)
        if self.moments != "fp32":
            for p in grads:
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in self.state[p]:
                        round_moment_(local(self.state[p][name]), self.moments, root=name == "exp_avg_sq")
        return updated

    def _by_rule(self, index: int, grads: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Update the parameters of a group of sgd or muon. Returns parameter -> master."""
        group, rate = self.param_groups[index], self._rate(index, torch.float32)
        updated = {}
        for p, grad in grads.items():
            state = self._state(p, counts_on_device=True)
            state.pop("exp_avg_sq", None)
            state["step"] += 1
            master, buffer = local(self.master_param(p)), local(state["exp_avg"])
            if group["rule"] == "sgd":
                buffer.mul_(self.momentum).add_(grad.add(master, alpha=group["weight_decay"]))
                master.sub_(buffer * rate)
            else:
                buffer.lerp_(grad, 1 - self.momentum)
                step = orthogonal(grad.lerp(buffer, self.momentum)).float()
                master.mul_(1 - rate * group["weight_decay"])
                master.sub_(step * (rate * (RMS * math.sqrt(max(step.shape)))))
            updated[p] = master
        write_plain(updated)
        return updated


def orthogonal(matrix: Tensor) -> Tensor:
    """bfloat16 [rows, columns]: the matrix with singular values near 1, by Newton and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALL)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def round_moment_(moment: Tensor, kind: str, *, root: bool = False) -> None:
    """Round a moment in place to bf16, or to fp8 in blocks of BLOCK elements in memory order. root: the root of its
    values is rounded, and what is above 0 stays there."""
    if kind == "bf16":
        moment.copy_(moment.bfloat16())
        return
    flat = moment.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    blocks = blocks.sqrt() if root else blocks
    scale = (blocks.abs().amax(1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (blocks / scale).to(torch.float8_e4m3fn).to(torch.float32)
    if root:
        codes = torch.where(blocks > 0, codes.clamp(min=LEAST), codes)
    values = codes * scale
    values = values.square() if root else values
    moment.copy_(values.view(-1)[: len(flat)].view_as(moment))
