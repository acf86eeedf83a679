"""High-precision attention by the fastest kernels, which repeat to the bit if torch uses deterministic algorithms.

cuDNN's attention is the faster one on Hopper, and its forward pass repeats. Its backward, as torch calls it, adds up
the gradient of q in the order in which thread blocks finish. So torch does not use cuDNN at all under
torch.use_deterministic_algorithms. Here forward is then cuDNN's, and backward is cuDNN's deterministic one
(ops.attention). Without nvidia-cudnn-frontend, backward is flash attention's deterministic one. It takes the
tensors that cuDNN's forward saves: the output, and the logarithm of each row's sum of exponentials.

torch guarantees nothing for its private operators. So each is tried once per head width, at several lengths. If one
disagrees with torch's own attention, torch's own runs.
"""

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.memo import constant_result, memo
from hqsweep.nn.core.context import use_kernels
from hqsweep.ops.attention import (
    attention_back,
    attention_forward,
    attention_on_cpu,
    attention_on_cpu_back,
    flash_back,
    has_cudnn,
)
from hqsweep.torch_private import cudnn_attention, flash_attention

MOST_WIDTH = 128
"""The largest head width that both kernels take."""
AGREES = 0.02
"""The largest relative distance between two bfloat16 attentions that agree."""
CUDNN, FLASH = "cudnn", "flash"
LENGTHS = (32, 37, 256)
"""The lengths at which kernels are tried. The shortest one is the least that they are used for."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v for q, k, v [..., T, E], like torch's scaled_dot_product_attention."""
    if torch.compiler.is_compiling() and _is_flash_on_cpu(q, k, v):
        return _OnCpu.apply(q, k, v, is_causal)
    way = way_back(q, k, v, is_causal) if torch.are_deterministic_algorithms_enabled() else None
    if way is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return _CudnnForward.apply(q, k, v, is_causal, way)


def _is_flash_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch would use its flash attention on the CPU."""
    alike = q.dtype is k.dtype is v.dtype and q.shape == k.shape == v.shape
    dense = all(x.stride(-1) == 1 for x in (q, k, v))
    return q.is_cpu and alike and dense and q.dim() == 4 and q.numel() > 0 and _is_flash_allowed()


@constant_result
def _is_flash_allowed() -> bool:
    return torch.backends.cuda.flash_sdp_enabled()  # applies to CPUs, too


def way_back(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str | None:
    """Return the backward to combine with cuDNN's forward. None: torch chooses both passes."""
    alike = q.dtype is k.dtype is v.dtype is torch.bfloat16 and q.shape == k.shape == v.shape
    if not alike or q.dim() != 4 or not use_kernels(q):
        return None
    length, width = q.shape[2:]
    takes = length >= LENGTHS[0] and width % 8 == 0 and width <= MOST_WIDTH
    return _tried(q.device, width, is_causal) if takes else None


@constant_result
def _tried(*case: Hashable) -> str | None:
    """Return _agreeing() if it is known or can be tried; else None."""
    return _agreeing(*case) if _is_answered(_agreeing, case) else None


def _is_answered(trial: Callable[..., Hashable], case: tuple[Hashable, ...]) -> bool:
    """Return whether a trial has a result or can run. During the capture of a CUDA graph none can run."""
    return case in trial.results or not torch.cuda.is_current_stream_capturing()


@memo
def _agreeing(device: torch.device, width: int, is_causal: bool) -> str | None:
    """Return the first backward that agrees with flash attention on a Hopper, in output and gradients of one head."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return next((way for way in _ways() if _agrees(way, device, width, is_causal)), None)


def repeats_in_parts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Return whether attention_forward() gives the bits of cudnn_forward() when it takes a part of the sequences at a
    time.

    q, k, v: [B, H, T, E].
    """
    case = q.device, q.shape[3], is_causal
    return has_cudnn() and _is_answered(_same_in_parts, case) and _same_in_parts(*case)


@memo
def _same_in_parts(device: torch.device, width: int, is_causal: bool) -> bool:
    with torch.inference_mode(False), torch.no_grad():
        return _at_all_lengths(lambda length: _is_same_in_parts(device, length, width, is_causal))


def _is_same_in_parts(device: torch.device, length: int, width: int, is_causal: bool) -> bool:
    angles = torch.arange(6 * length * width, device=device, dtype=torch.float32).view(3, 2, 1, length, width)
    q, k, v = torch.sin(angles * angles.sqrt()).bfloat16().unbind(0)
    expected, its_sums = cudnn_forward(q, k, v, is_causal)
    o, sums = torch.empty_like(q), torch.empty_like(its_sums)
    taken = all(
        attention_forward(q[part], k[part], v[part], is_causal, o[part], sums[part]) for part in (slice(1), slice(1, 2))
    )
    return taken and torch.equal(o, expected) and torch.equal(sums, its_sums)


def _ways() -> list[str]:
    return [CUDNN, FLASH] if has_cudnn() else [FLASH]


def _agrees(way: str, device: torch.device, width: int, is_causal: bool) -> bool:
    return _at_all_lengths(lambda length: _agrees_at(way, device, length, width, is_causal))


def _at_all_lengths(agrees: Callable[[int], bool]) -> bool:
    try:
        return all(map(agrees, LENGTHS))
    except Exception:  # libraries of another version raise anything
        return False


def _agrees_at(way: str, device: torch.device, length: int, width: int, is_causal: bool) -> bool:
    angles = torch.arange(4 * length * width, device=device, dtype=torch.float32).view(4, 1, 1, length, width)
    q, k, v, do = torch.sin(angles * angles.sqrt()).bfloat16().unbind(0)
    o, sums = cudnn_forward(q, k, v, is_causal)
    expected, its_sums, *_ = flash_attention(q, k, v, 0.0, is_causal)
    ours = [o, sums, *_back(way, do, q, k, v, o, sums, is_causal)]
    theirs = [expected, its_sums, *flash_back(do, q, k, v, expected, its_sums, is_causal)]
    return all((a - b).float().norm() <= AGREES * b.float().norm() for a, b in zip(ours, theirs, strict=True))


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output, and float32 [B, H, T]: the logarithm of each row's sum of exponentials."""
    o, sums, *_ = cudnn_attention(q, k, v, None, True, 0.0, is_causal)
    return o, sums.reshape(q.shape[:3])


def _back(way: str, *operands: Tensor | bool) -> list[Tensor]:
    """Return the gradients of q, k and v, [B, H, T, E] each. operands: do, q, k, v, o, sums, is_causal."""
    if way == FLASH:
        return flash_back(*operands)
    return [x.transpose(1, 2) for x in attention_back(*operands).unbind(2)]


class _OnCpu(torch.autograd.Function):
    """Saves q, k, v, the output and its sums."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        o, sums = attention_on_cpu(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, sums)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        return *attention_on_cpu_back(do, *ctx.saved_tensors, is_causal=ctx.is_causal), None


class _CudnnForward(torch.autograd.Function):
    """Saves q, k, v, the output and its sums."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, way: str) -> Tensor:
        o, sums = cudnn_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, sums)
        ctx.is_causal, ctx.way = is_causal, way
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        return *_back(ctx.way, do, *ctx.saved_tensors, ctx.is_causal), None, None
