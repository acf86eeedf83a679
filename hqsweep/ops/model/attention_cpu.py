"""torch's flash attention on the CPU as the operator hqsweep::attention_on_cpu, for traced graphs.

torch tags its own operator as random, although there is no dropout here. For a random operator that backward
recomputes, torch.compile keeps the generator's state. torch 2.13 confuses this state with the DeviceMesh that backward
needs if parameters are DTensors.
"""

import torch
from torch import Tensor

from hqsweep.ops.addresses import described
from hqsweep.ops.library import operator
from hqsweep.ops.quantize.kernels import DTYPES

ATEN = torch.ops.aten
AXES = 4


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


@operator(
    "attention_on_cpu(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor)", fake=_flash, devices=("CPU",)
)
def attention_on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(E)) v [B, H, T, E], and the logarithm of each row's sum of exponentials.

    q, k, v: [B, H, T, E] of one dtype. Results have the layouts that attention_on_cpu_back() reads. ValueError for
    others.
    """
    alike = q.shape == k.shape == v.shape and q.dtype is k.dtype is v.dtype in DTYPES and q.dim() == AXES
    if not alike or not all(x.numel() and x.untyped_storage().nbytes() and x.stride(-1) == 1 for x in (q, k, v)):
        got = ", ".join(described(x) for x in (q, k, v))
        raise ValueError(
            f"attention_on_cpu: q, k and v are {got}; it takes [B, H, T, E] with elements, of one shape and dtype"
            f" ({', '.join(map(str, DTYPES))}), whose last axis has no gaps"
        )
    return _flash(q, k, v, is_causal)


def attention_on_cpu_back(do: Tensor, *saved: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v. do: the gradient of the output; saved: q, k, v and both results of the
    forward pass."""
    return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(do, *saved, 0.0, is_causal)
