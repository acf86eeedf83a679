"""Operators of which each element depends on its own inputs only, on CUDA: activations of an MLP, and AdamW.

hqsweep::activation and activation_backward compute in float32 and round each output once to bfloat16 (formulas:
csrc/cuda/activation.cuh). The exponential is the GPU's instruction, with a relative error below 2^-20. torch's
operators are the reference.

hqsweep::adamw_ updates float32 parameters in one pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hqsweep.ops.library import described, empty, extension, operator, where

INPUTS = {"swiglu": 2, "gelu": 1}
"""Activation -> input width divided by output width."""


def takes_activation(z: Tensor, kind: str) -> bool:
    """Return whether the kernels compute `kind` of z [..., W]: bfloat16, with W a multiple of 8 elements per input."""
    return z.dtype is torch.bfloat16 and z.dim() > 0 and z.shape[-1] % (8 * INPUTS[kind]) == 0


def _outputs(out: Tensor, amax: bool, signs: bool | None) -> list[Tensor]:
    return [out, *(out.new_empty((1, 1), dtype=torch.float32) for _ in range(_count(amax, signs)))]


def _count(amax: bool, signs: bool | None) -> int:
    """Return the number of amaxes to find."""
    return amax + (signs is not None)


def _forward_fake(z, kind, amax=False, signs=None, end=None):
    return _outputs(z.new_empty((z.shape[0], z.shape[1] // INPUTS[kind])), amax, signs)


@operator(
    "activation(Tensor z, str kind, bool amax=False, bool? signs=None, Tensor? end=None) -> Tensor[]",
    fake=_forward_fake,
    devices=("CUDA",),
)
def activation(
    z: Tensor, kind: str, amax: bool = False, signs: bool | None = None, end: Tensor | None = None
) -> list[Tensor]:
    """Return [h], followed by the wanted amaxes, float32 [1, 1] each. NaN is ignored. z: bfloat16 [M, W].

    "swiglu": h = silu(g) * u [M, W / 2] with [g, u] = z. "gelu": its tanh approximation, [M, W].
    amax: find the largest magnitude of h. signs, unless None: also find the amax of h's columns after the random
    Hadamard transform with these signs. end: int64 [1]; rows from this index on are padding and are skipped.
    ValueError for a z that is not contiguous bfloat16 with two axes at a multiple of 16 bytes, or whose W is not a
    multiple of 8 (swiglu: 16). ValueError also for signs without amax, with end, or with an M that is not a multiple of
    16.
    """
    check_input(z, kind)
    return _run(z, None, kind, amax, signs, end=end)


def activation_into(out: Tensor, z: Tensor, kind: str) -> None:
    """Write activation() of z to out. ValueError as activation() raises it, and for an out unlike h."""
    check_input(z, kind)
    check_gradient(out, z, kind, "out")
    _run(z, None, kind, False, None, out)


def _backward_fake(dh, z, kind, amax=False, signs=None, end=None):
    return _outputs(torch.empty_like(z), amax, signs)


@operator(
    "activation_backward(Tensor dh, Tensor z, str kind, bool amax=False, bool? signs=None, Tensor? end=None) "
    "-> Tensor[]",
    fake=_backward_fake,
    devices=("CUDA",),
)
def activation_backward(
    dh: Tensor, z: Tensor, kind: str, amax: bool = False, signs: bool | None = None, end: Tensor | None = None
) -> list[Tensor]:
    """Return [dz], followed by the wanted amaxes. dh: the gradient of h. dz: bfloat16 [M, W].

    Amaxes, end and ValueError are as for activation().
    """
    check_input(z, kind)
    check_gradient(dh, z, kind)
    return _run(z, dh, kind, amax, signs, end=end)


def _is_plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def check_input(z: Tensor, kind: str) -> None:
    """Raise ValueError for a z or an activation that the kernels do not take."""
    if kind not in INPUTS:
        raise ValueError(f"activation is {kind!r}; allowed: {', '.join(INPUTS)}")
    if z.dim() != 2 or not takes_activation(z, kind) or not _is_plain(z):
        raise ValueError(
            f"z is {described(z)}; {kind} takes contiguous bfloat16 with two axes at a multiple of 16 bytes, and"
            f" a width that is a multiple of {8 * INPUTS[kind]}"
        )


def check_gradient(dh: Tensor, z: Tensor, kind: str, name: str = "dh") -> None:
    """Raise ValueError for a gradient (or output) that does not fit z, or that the kernels cannot access."""
    shape = (z.shape[0], z.shape[1] // INPUTS[kind])
    if dh.dtype is not z.dtype or dh.shape != shape or dh.device != z.device or not _is_plain(dh):
        raise ValueError(f"{name} is {described(dh)}; it takes contiguous bfloat16 {shape} at a multiple of 16 bytes")


def _run(
    z: Tensor,
    dh: Tensor | None,
    kind: str,
    amax: bool,
    signs: bool | None,
    out: Tensor | None = None,
    end: Tensor | None = None,
) -> list[Tensor]:
    if end is not None and (
        signs is not None or end.dtype != torch.int64 or end.numel() != 1 or end.device != z.device
    ):
        raise ValueError(f"end is {described(end)}; it takes int64 [1] on the device of z, without signs")
    if signs is not None and (not amax or z.shape[0] % 16):
        raise ValueError(f"z has {z.shape[0]} rows; columns are transformed in strips of 16 rows, and with amax=True")
    (rows, cols), inputs = z.shape, INPUTS[kind]
    width = cols // inputs if dh is None else cols
    out = empty(z, (rows, width), (width or 1, 1), z.dtype) if out is None else out
    amaxes = [torch.zeros((1, 1), dtype=torch.float32, device=z.device) for _ in range(_count(amax, signs))]
    addresses = [tensor.data_ptr() for tensor in amaxes] + [0] * (2 - len(amaxes))
    matrices = (z.data_ptr(), 0 if dh is None else dh.data_ptr(), out.data_ptr())
    extension().activation_cuda(
        kind, rows, cols // inputs, *matrices, *addresses, bool(signs), 0 if end is None else end.data_ptr(), *where(z)
    )
    return [out, *amaxes]


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
            if not takes_update(tensor) or tensor.shape != p.shape or tensor.device != params[0].device:
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


def takes_update(tensor: Tensor) -> bool:
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
