"""Attention in high precision by the fastest of torch's kernels that repeat to the bit, where that is asked for.

cuDNN's attention is the faster one on Hopper, and its forward pass repeats; its backward adds up the gradient of q in
the order in which thread blocks come, so that torch leaves cuDNN out altogether under
torch.use_deterministic_algorithms. Here forward is cuDNN's then, and backward is flash attention's deterministic one,
which takes what cuDNN's forward saves: the output, and the logarithm of the sum of exponentials of each row.

torch promises nothing for either operator. Both are therefore tried once for every width of a head, at some lengths,
and torch chooses by itself where they do not agree with what it would have computed.
"""

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hqsweep.memo import constant_result, memo
from hqsweep.nn.context import use_kernels

ATEN = torch.ops.aten
MOST_WIDTH = 128
"""The largest width of a head that both kernels take."""
AGREES = 0.02
"""The largest relative distance of two attentions in bfloat16 that agree."""
LENGTHS = (32, 37, 256)
"""The lengths at which the kernels are tried; they are used from the shortest on."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(E)) v for q, k, v [..., T, E] -> [..., T, E], as torch's scaled_dot_product_attention."""
    if torch.are_deterministic_algorithms_enabled() and _takes(q, k, v, is_causal):
        return _CudnnForward.apply(q, k, v, is_causal)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _takes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether forward can be cuDNN's and backward flash attention's."""
    alike = q.dtype is k.dtype is v.dtype is torch.bfloat16 and q.shape == k.shape == v.shape
    if not alike or q.dim() != 4 or not use_kernels(q):
        return False
    length, width = q.shape[2:]
    return length >= LENGTHS[0] and width % 8 == 0 and width <= MOST_WIDTH and _tried(q.device, width, is_causal)


@constant_result
def _tried(*case: Hashable) -> bool:
    """_agree(); while a CUDA graph is recorded nothing can be tried, and what is not known yet is False."""
    return (case in _agree.results or not torch.cuda.is_current_stream_capturing()) and _agree(*case)


@memo
def _agree(device: torch.device, width: int, is_causal: bool) -> bool:
    """Whether, on a Hopper, output and gradients of one head are those of flash attention both ways."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    with torch.inference_mode(False), torch.no_grad():
        try:
            return all(_agree_at(device, length, width, is_causal) for length in LENGTHS)
        except RuntimeError:
            return False


def _agree_at(device: torch.device, length: int, width: int, is_causal: bool) -> bool:
    angles = torch.arange(4 * length * width, device=device, dtype=torch.float32).view(4, 1, 1, length, width)
    q, k, v, do = torch.sin(angles * angles.sqrt()).bfloat16().unbind(0)
    o, sums = _forward(q, k, v, is_causal)
    expected, its_sums, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    ours = [o, sums, *_backward(do, q, k, v, o, sums, is_causal)]
    theirs = [expected, its_sums, *_backward(do, q, k, v, expected, its_sums, is_causal)]
    return all((a - b).float().norm() <= AGREES * b.float().norm() for a, b in zip(ours, theirs, strict=True))


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The output, and float32 [B, H, T], the logarithm of each row's sum of exponentials."""
    o, sums, *_ = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
    return o, sums.reshape(q.shape[:3])


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    unused = q.new_empty(0, dtype=torch.int64)  # the state of dropout
    length = q.shape[2]
    return ATEN._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, sums, None, None, length, length, 0.0, is_causal, unused, unused
    )


class _CudnnForward(torch.autograd.Function):
    """Saves q, k, v, the output and its sums."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        o, sums = _forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, sums)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(do, *ctx.saved_tensors, ctx.is_causal), None
