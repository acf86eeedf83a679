"""torch's flash attention on the CPU as an operator of ours, hqsweep::attention_on_cpu, for traced graphs.

torch tags its own as one that draws random numbers, though there is no dropout here. torch.compile keeps the state of
torch's generator for an operator that it computes again in backward, and torch 2.13 mixes such a state up with the
DeviceMesh that backward needs where parameters are DTensors.
"""

from torch import Tensor

from hqsweep.ops.addresses import described
from hqsweep.ops.library import operator
from hqsweep.ops.quantize.kernels import DTYPES
from hqsweep.torch_private import flash_attention_on_cpu, flash_attention_on_cpu_backward

AXES = 4


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return flash_attention_on_cpu(q, k, v, 0.0, is_causal)


@operator(
    "attention_on_cpu(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor)", fake=_flash, devices=("CPU",)
)
def attention_on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """q, k, v [B, H, T, E] of one dtype -> softmax(q k^T / sqrt(E)) v [B, H, T, E], and the logarithm of each row's sum
    of exponentials, in the layouts that attention_on_cpu_back() reads. ValueError for other tensors."""
    alike = q.shape == k.shape == v.shape and q.dtype is k.dtype is v.dtype in DTYPES and q.dim() == AXES
    if not alike or not all(x.numel() and x.untyped_storage().nbytes() and x.stride(-1) == 1 for x in (q, k, v)):
        got = ", ".join(described(x) for x in (q, k, v))
        raise ValueError(
            f"attention_on_cpu: q, k and v are {got}; it takes [B, H, T, E] with elements, of one shape and dtype"
            f" ({', '.join(map(str, DTYPES))}), whose last axis has no gaps"
        )
    return _flash(q, k, v, is_causal)


def attention_on_cpu_back(do: Tensor, *saved: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, of the output's and of q, k, v and the results of attention_on_cpu()."""
    return flash_attention_on_cpu_backward(do, *saved, 0.0, is_causal)
