"""AdamW on float32 parameters on CUDA in one pass: hqsweep::adamw_."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hqsweep.ops.library import described, extension, operator, where


@operator(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor[] steps, "
    "Tensor lr, Tensor? factor, float beta1, float beta2, float eps, float weight_decay) -> ()",
    fake=lambda *arguments: None,
    devices=("CUDA",),
)
def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    factor: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Run adamw_ by the kernel."""
    for p, *others, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        for tensor in (p, *others):
            if not takes(tensor) or tensor.shape != p.shape or tensor.device != params[0].device:
                wanted = f"float32 {list(p.shape)}, contiguous, on {params[0].device}"
                raise ValueError(f"a parameter, its gradient or average is {described(tensor)}; it takes {wanted}")
        _check_one(step, "a step", torch.float32, params[0].device)
    _check_one(lr, "lr", torch.float64, params[0].device)
    if factor is not None:
        _check_one(factor, "the factor", torch.float32, params[0].device)
    addresses = ([tensor.data_ptr() for tensor in each] for each in (params, grads, exp_avgs, exp_avg_sqs, steps))
    extension().adamw_cuda(
        *addresses, [p.numel() for p in params], lr.data_ptr(), 0 if factor is None else factor.data_ptr(),
        beta1, beta2, eps, weight_decay, *where(params[0]),
    )  # fmt: skip


def _check_one(tensor: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.numel() != 1 or tensor.device != device:
        raise ValueError(f"{name} is {described(tensor)}; it is one {str(dtype).removeprefix('torch.')} on {device}")


def takes(tensor: Tensor) -> bool:
    """Return whether the kernel takes a CUDA tensor: float32, contiguous, without the negative bit."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg()


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    factor: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update all parameters by AdamW in place. Tensors are float32, contiguous, on one GPU; steps [] count this step.

        g = grad * factor;  p = param * (1 - lr * weight_decay)
        exp_avg = exp_avg + (1 - beta1) * (g - exp_avg);  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        param = p - lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)

    lr: float64 []; factor: float32 [], or None for 1. Scalars are computed in float64 and rounded once, elements in
    float32. The averages equal torch.optim.AdamW on a CPU (foreach=False) to the bit. Parameters can differ, since
    torch's square root is not always correctly rounded. ValueError for tensors that the kernel does not take.
    """
    plain = [p.detach() for p in params]
    _adamw(plain, list(grads), list(exp_avgs), list(exp_avg_sqs), list(steps), lr, factor, *betas, eps, weight_decay)
