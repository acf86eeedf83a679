"""Activations of an MLP on CUDA as torch operators: hqsweep::activation and activation_backward.

They compute in float32 and round each output once to bfloat16 (formulas: csrc/cuda/activation.cuh). Each element
depends on its own inputs only. The exponential is the GPU's instruction, with a relative error below 2^-20. torch's
operators are the reference.
"""

import torch
from torch import Tensor

from hqsweep.ops.library import described, empty, extension, operator, where

INPUTS = {"swiglu": 2, "gelu": 1}
"""Activation -> input width divided by output width."""


def takes(z: Tensor, kind: str) -> bool:
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
    if z.dim() != 2 or not takes(z, kind) or not _is_plain(z):
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
