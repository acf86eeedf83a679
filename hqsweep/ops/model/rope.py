"""Rotary positions as torch operators on CUDA: hqsweep::rope, rope_, join_heads.

In a head of E elements the pair (2i, 2i + 1) turns by t * base^(-2i/E) at position t (Su et al., arXiv 2104.09864):
  (a, b) -> (fl(fl(a c) - fl(b s)), fl(fl(a s) + fl(b c))), c and s being cos and sin of the angle,
in float32, rounded once to bfloat16. nn.rope.rotate is the reference, and computes other devices. Bits do not
depend on other work on the GPU, nor on CUDA graphs.
"""

import torch
from torch import Tensor

from hqsweep.memo import memo
from hqsweep.ops.library import described, empty, extension, operator, where

MOST_WIDTH = 512
"""The largest head width with rotation."""
_ALIGNED = 8
"""Elements that the kernels load at once, 16 bytes."""


def frequencies(width: int, base: float, device: torch.device | str) -> Tensor:
    """Return float32 [E / 2]: the angle of each pair at position 1, for a head of E = width elements."""
    return base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def fits(width: int, base: float | None) -> bool:
    """Return whether the kernels take heads of this width."""
    return width % _ALIGNED == 0 and width > 0 and (base is None or width <= MOST_WIDTH)


def readable(x: Tensor) -> bool:
    """Return whether the kernels can read a bfloat16 x.

    Its last axis has no gaps. Its start and the strides of its other axes are multiples of 16 bytes.
    """
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    return (
        x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not x.is_neg() and all(step % _ALIGNED == 0 for step in steps)
    )


def _read(x: Tensor) -> Tensor:
    """Return x, or a copy that the kernels can read."""
    return x if readable(x) else x.clone(memory_format=torch.contiguous_format)


def _steps(x: Tensor, *axes: int) -> list[int]:
    """Return the strides of axes; 0 for an axis with one entry, whose stride is arbitrary."""
    return [x.stride(axis) if x.shape[axis] != 1 else 0 for axis in axes]


@memo
def _rope(width: int, base: float | None):
    """Return the extension's Rope with the frequencies.

    They stay on the CPU: a device tensor would have to outlive the call, and a CUDA graph could own its memory.
    """
    return extension().Rope([] if base is None else frequencies(width, base, "cpu").tolist())


def _split(qkv: Tensor, heads: int, base: float | None) -> tuple[int, int, int]:
    """Return the sequences, the positions and the head width of qkv [B, T, 3 D]. ValueError for unfit tensors."""
    width = qkv.shape[-1] // (3 * heads) if heads > 0 and qkv.dim() else 0
    right = qkv.dtype is torch.bfloat16 and qkv.dim() == 3 and qkv.shape[-1] == 3 * heads * width
    if not right or not fits(width, base):
        takes = f"it takes bfloat16 [B, T, 3 * {heads} * E], E a multiple of {_ALIGNED} up to {MOST_WIDTH}"
        raise ValueError(f"qkv is {described(qkv)}; {takes}")
    return *qkv.shape[:2], width


def _parts(x: Tensor, count: int, heads: int, width: int) -> list[tuple[int, ...]]:
    """Return address and strides of the first `count` head tensors in x [B, T, ...], which are adjacent."""
    step = heads * width * x.element_size()
    return [(x.data_ptr() + part * step, *_steps(x, 0, 1), width) for part in range(count)]


@operator(
    "rope(Tensor qkv, SymInt heads, float base) -> Tensor",
    fake=lambda qkv, heads, base: qkv.new_empty((*qkv.shape[:2], 2, heads, qkv.shape[2] // (3 * heads))),
    devices=("CUDA",),
)
def rope(qkv: Tensor, heads: int, base: float) -> Tensor:
    """Return q and k rotated, [B, T, 2, H, E]. qkv: bfloat16 [B, T, 3 D]. ValueError for tensors that the kernels do
    not take."""
    sequences, positions, width = _split(qkv, heads, base)
    qkv, dim = _read(qkv), 2 * heads * width
    out = empty(qkv, (sequences, positions, dim), (positions * dim, dim, 1), qkv.dtype)
    ends = _parts(qkv, 2, heads, width), _parts(out, 2, heads, width)
    extension().rope_cuda(_rope(width, base), *ends, (sequences, positions, heads, width), False, *where(qkv))
    return out.view(sequences, positions, 2, heads, width)


@operator("rope_(Tensor(a!) qkv, SymInt heads, float base, bool back) -> ()", fake=lambda *_: None, devices=("CUDA",))
def rope_(qkv: Tensor, heads: int, base: float, back: bool) -> None:
    """Rotate q and k of qkv [B, T, 3 D] in place. back: rotate by the negative angle, for gradients.

    ValueError unless qkv is readable().
    """
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
    """Return the gradient of qkv, [B, T, 3 D], from the gradients of q, k and v.

    dq, dk, dv: bfloat16 [B, H, T, E] with any strides. dq and dk are rotated back, unless base is None. ValueError for
    tensors that the kernels do not take.
    """
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
