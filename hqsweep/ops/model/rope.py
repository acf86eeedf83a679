"""Rotary positions as torch operators: hqsweep::rope, rope_, join_heads.

In a head of E elements the pair (2i, 2i + 1) turns by t * base^(-2i/E) at position t (Su et al., arXiv 2104.09864):
  (a, b) -> (fl(fl(a c) - fl(b s)), fl(fl(a s) + fl(b c))), c and s being cos and sin of the angle,
in float32, rounded once to bfloat16. There are kernels for CUDA alone; rotate is the reference, and
computes it on other devices. Bits do not depend on what else runs, nor on CUDA graphs.
"""

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.ops.addresses import described, empty
from hqsweep.ops.library import extension, operator, where

MOST_WIDTH = 512
"""The largest width of a head whose pairs turn."""
_ALIGNED = 8
"""Elements that the kernels load at once, 16 bytes."""


def frequencies(width: int, base: float, device: torch.device | str) -> Tensor:
    """float32 [E / 2]: the angle of each pair of a head of E = width elements at position 1."""
    return base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def fits(width: int, base: float | None) -> bool:
    """Whether the kernels take heads of this width."""
    return width % _ALIGNED == 0 and width > 0 and (base is None or width <= MOST_WIDTH)


def readable(x: Tensor) -> bool:
    """Whether the kernels can read x, bfloat16: its last axis has no gaps, and its other axes and its beginning lie at
    multiples of 16 bytes."""
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    return (
        x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not x.is_neg() and all(step % _ALIGNED == 0 for step in steps)
    )


def _read(x: Tensor) -> Tensor:
    """x, or a copy that the kernels can read."""
    return x if readable(x) else x.clone(memory_format=torch.contiguous_format)


def _steps(x: Tensor, *axes: int) -> list[int]:
    """The strides of axes; 0 for an axis with one entry, whose stride says nothing."""
    return [x.stride(axis) if x.shape[axis] != 1 else 0 for axis in axes]


@memo
def _rope(width: int, base: float | None):
    """The frequencies as the extension takes them. They are on the CPU: a tensor on a device would have to outlive the
    call, and a CUDA graph could own its memory."""
    return extension().Rope([] if base is None else frequencies(width, base, "cpu").tolist())


def _split(qkv: Tensor, heads: int, base: float | None) -> tuple[int, int, int]:
    """The number of sequences and positions, and the width of a head, of qkv [B, T, 3 D]; ValueError for what the
    kernels cannot take."""
    width = qkv.shape[-1] // (3 * heads) if heads > 0 and qkv.dim() else 0
    right = qkv.dtype is torch.bfloat16 and qkv.dim() == 3 and qkv.shape[-1] == 3 * heads * width
    if not right or not fits(width, base):
        takes = f"it takes bfloat16 [B, T, 3 * {heads} * E], E a multiple of {_ALIGNED} up to {MOST_WIDTH}"
        raise ValueError(f"qkv is {described(qkv)}; {takes}")
    return *qkv.shape[:2], width


def _parts(x: Tensor, count: int, heads: int, width: int) -> list[tuple[int, ...]]:
    """The addresses and strides of the first `count` tensors of heads in x [B, T, ...], which stand one behind the
    other."""
    step = heads * width * x.element_size()
    return [(x.data_ptr() + part * step, *_steps(x, 0, 1), width) for part in range(count)]


@operator(
    "rope(Tensor qkv, SymInt heads, float base) -> Tensor",
    fake=lambda qkv, heads, base: qkv.new_empty((*qkv.shape[:2], 2, heads, qkv.shape[2] // (3 * heads))),
    devices=("CUDA",),
)
def rope(qkv: Tensor, heads: int, base: float) -> Tensor:
    """qkv bfloat16 [B, T, 3 D] -> q and k, turned, [B, T, 2, H, E]. ValueError for what the kernels cannot take."""
    sequences, positions, width = _split(qkv, heads, base)
    qkv, dim = _read(qkv), 2 * heads * width
    out = empty(qkv, (sequences, positions, dim), (positions * dim, dim, 1), qkv.dtype)
    ends = _parts(qkv, 2, heads, width), _parts(out, 2, heads, width)
    extension().rope_cuda(_rope(width, base), *ends, (sequences, positions, heads, width), False, *where(qkv))
    return out.view(sequences, positions, 2, heads, width)


@operator("rope_(Tensor(a!) qkv, SymInt heads, float base, bool back) -> ()", fake=lambda *_: None, devices=("CUDA",))
def rope_(qkv: Tensor, heads: int, base: float, back: bool) -> None:
    """rope in place: q and k of a readable qkv [B, T, 3 D] are turned where they are; back: by the angle with the other
    sign, as their gradients are."""
    sequences, positions, width = _split(qkv, heads, base)
    if not readable(qkv):
        raise ValueError(
            f"qkv is {described(qkv)} with strides {qkv.stride()}, which the kernels cannot write in place"
        )
    places = _parts(qkv, 2, heads, width)
    extension().rope_cuda(_rope(width, base), places, places, (sequences, positions, heads, width), back, *where(qkv))


def _joined(dq: Tensor, dk: Tensor, dv: Tensor, base: float | None) -> Tensor:
    sequences, heads, positions, width = dq.shape
    return dq.new_empty((sequences, positions, 3 * heads * width))


@operator("join_heads(Tensor dq, Tensor dk, Tensor dv, float? base) -> Tensor", fake=_joined, devices=("CUDA",))
def join_heads(dq: Tensor, dk: Tensor, dv: Tensor, base: float | None) -> Tensor:
    """The gradients of q, k and v, bfloat16 [B, H, T, E] of any strides -> the gradient of qkv [B, T, 3 D]: dq and dk
    turned back, by the angle with the other sign, or as they are where base is None. ValueError for what the kernels
    cannot take."""
    for x in (dq, dk, dv):
        right = x.dtype is torch.bfloat16 and x.shape == dq.shape and x.device == dq.device and x.dim() == 4
        if not right or not fits(x.shape[-1], base):
            takes = f"it takes three bfloat16 [B, H, T, E], E a multiple of {_ALIGNED} up to {MOST_WIDTH}"
            raise ValueError(f"a gradient is {described(x)}; {takes}")
    gradients = [_read(x) for x in (dq, dk, dv)]
    sequences, heads, positions, width = dq.shape
    dim = 3 * heads * width
    out = empty(dq, (sequences, positions, dim), (positions * dim, dim, 1), dq.dtype)
    places = [(x.data_ptr(), *_steps(x, 0, 2, 1)) for x in gradients]
    sizes = (sequences, positions, heads, width)
    extension().rope_cuda(_rope(width, base), places, _parts(out, 3, heads, width), sizes, True, *where(dq))
    return out
