"""Attention by cuDNN's frontend: its gradients by the backward that repeats to the bit, as a torch operator,
hqsweep::attention_back; and forward, written where its caller wants it.

torch calls cuDNN's other backward, which adds up the gradient of q in the order in which thread blocks come. This one
writes the gradients of the scores to memory instead, 2 bytes each, and multiplies them by k (NVIDIA's
nvidia-cudnn-frontend, use_deterministic_algorithm; half the time of flash attention's on a Hopper). Where they would
take too much memory, batch and heads come in parts, whose bits are those of the whole; a head that has too many for
itself is left to flash attention.
"""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hqsweep.memo import constant_result, memo
from hqsweep.ops.addresses import empty
from hqsweep.ops.library import operator
from hqsweep.ops.model.rope import readable
from hqsweep.torch_private import current_raw_stream, flash_attention_backward

CUDNN_FRONTEND = "nvidia-cudnn-frontend"
MOST_SCORES = 1 << 29
"""Gradients of scores that are in memory at once: 1 GiB."""
_PADDED = 128
"""The lengths of rows and columns of scores are multiples of it."""
Sizes = tuple[int, ...]
SUMS = 5
"""The number of the sums among a plan's tensors: do, q, k, v, o, sums, and the gradients of q, k and v."""


def flash_back(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, is_causal: bool) -> list[Tensor]:
    """The gradients of q, k and v by flash attention, which repeats where torch is asked for deterministic kernels."""
    unused = q.new_empty(0, dtype=torch.int64)  # the state of dropout
    length = q.shape[2]
    gradients = flash_attention_backward(
        do, q, k, v, o, sums, None, None, length, length, 0.0, is_causal, unused, unused
    )
    return list(gradients)


def frontend_version() -> str | None:
    """The version of CUDNN_FRONTEND, on which bits of gradients depend; None where it is not installed."""
    try:
        return version(CUDNN_FRONTEND)
    except PackageNotFoundError:
        return None


@constant_result
def has_cudnn() -> bool:
    """Whether cuDNN can be asked for by its frontend."""
    return _cudnn() is not None


@memo
def _cudnn() -> ModuleType | None:
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError, RuntimeError):  # not installed, or it finds no cuDNN
        return None


def _joined(do: Tensor, q: Tensor, *others: Any) -> Tensor:
    sequences, heads, length, width = q.shape
    return q.new_empty((sequences, length, 3, heads, width))


@operator(
    "attention_back(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor sums, bool is_causal) -> Tensor",
    fake=_joined,
    devices=("CUDA",),
)
def attention_back(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, is_causal: bool) -> Tensor:
    """do, q, k, v, o bfloat16 [B, H, T, E] of any strides, sums float32 [B, H, T] (the logarithm of each row's sum of
    exponentials) -> the gradients of q, k and v, bfloat16 [B, T, 3, H, E]. For scores q k^T / sqrt(E)."""
    inputs = (_readable(do), q, k, v, o, sums)
    sequences, heads, length, width = q.shape
    row = 3 * heads * width
    joined = empty(q, (sequences, length, 3, heads, width), (length * row, row, heads * width, width, 1), q.dtype)
    tensors = [*inputs, *(x.transpose(1, 2) for x in joined.unbind(2))]
    sizes = _part(q.shape)
    plan = sizes and _plan(q.get_device(), sizes, tuple(x.stride() for x in tensors), is_causal)
    if not plan:
        for gradient, x in zip(tensors[len(inputs) :], flash_back(*inputs, is_causal), strict=True):
            gradient.copy_(x)
        return joined
    workspace = empty(q, (plan.workspace,), (1,), torch.uint8)
    for sequence in range(0, sequences, sizes[0]):
        for head in range(0, heads, sizes[1]):
            plan.run({number: x[sequence:, head:] for number, x in enumerate(tensors)}, workspace)
    return joined


def attention_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, o: Tensor, sums: Tensor) -> bool:
    """Write the output and the sums of q, k, v to o and sums, all as attention_back() reads them; False where cuDNN
    does not take them so, and nothing is written. On CUDA, where has_cudnn() says so."""
    tensors = dict(enumerate((q, k, v, o, sums), start=1))
    strides = tuple(x.stride() for x in tensors.values())
    read = all(map(readable, (q, o))) and not (k.is_neg() or v.is_neg())
    plan = read and _plan_forward(q.get_device(), tuple(q.shape), strides, is_causal)
    if plan:
        plan.run(tensors, empty(q, (plan.workspace,), (1,), torch.uint8))
    return bool(plan)


def _readable(x: Tensor) -> Tensor:
    """x, or a copy of one whose rows have gaps, or that repeats values."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return x if readable(x) and all(strides) else x.resolve_neg().contiguous()


def _part(shape: Sizes) -> Sizes | None:
    """The largest part of [B, H, T, E] whose scores fit in memory; None where those of one head do not."""
    sequences, heads, length, width = shape
    fitting = MOST_SCORES // (-(-length // _PADDED) * _PADDED) ** 2
    if fitting >= heads:
        return _divisor(sequences, fitting // heads), heads, length, width
    return (1, _divisor(heads, fitting), length, width) if fitting else None


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A graph of cuDNN's for tensors of one shape and of their strides, which have numbers."""

    graph: Any
    workspace: int
    """Bytes."""

    def run(self, tensors: Mapping[int, Tensor], workspace: Tensor) -> None:
        """Compute on the current stream. A tensor says where its first element lies."""
        device = workspace.get_device()
        handle = _handle(device, threading.get_ident())
        _cudnn().set_stream(handle, current_raw_stream(device))
        addresses = {number: x.data_ptr() for number, x in tensors.items()}
        self.graph.execute(addresses, workspace.data_ptr(), handle)


@memo
def _handle(device: int, thread: int) -> Any:
    """A thread's on the device, which is the current one: threads must not share a handle."""
    return _cudnn().create_handle()


@memo
def _plan(device: int, sizes: Sizes, strides: tuple[Sizes, ...], is_causal: bool) -> Plan | None:
    """The graph for do, q, k, v, o, sums and the gradients of q, k and v; None where cuDNN has none."""
    graph, described = _graph(device, sizes, dict(enumerate(strides)))
    do, q, k, v, o, stats = (graph.tensor(**described(number)) for number in range(SUMS + 1))
    gradients = graph.sdpa_backward(
        q=q, k=k, v=v, o=o, dO=do, stats=stats, attn_scale=sizes[3] ** -0.5, use_causal_mask=is_causal,
        use_deterministic_algorithm=True,
    )  # fmt: skip
    return _built(graph, {number: described(number) for number in range(SUMS + 1, len(strides))}, gradients)


@memo
def _plan_forward(device: int, sizes: Sizes, strides: tuple[Sizes, ...], is_causal: bool) -> Plan | None:
    """The graph for q, k, v, o and sums; None where cuDNN has none."""
    graph, described = _graph(device, sizes, dict(enumerate(strides, start=1)))
    q, k, v = (graph.tensor(**described(number)) for number in range(1, 4))
    scale = sizes[3] ** -0.5
    outputs = graph.sdpa(q=q, k=k, v=v, attn_scale=scale, use_causal_mask=is_causal, generate_stats=True)
    return _built(graph, {number: described(number) for number in (SUMS - 1, SUMS)}, outputs)


def _graph(device: int, sizes: Sizes, strides: Mapping[int, Sizes]) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """An empty graph, and what describes its tensors by their numbers."""
    cudnn = _cudnn()
    handle = _handle(device, threading.get_ident())
    half, single = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT

    def described(number: int) -> dict[str, Any]:
        if number == SUMS:
            return {"dim": [*sizes[:3], 1], "stride": [*strides[number], 1], "data_type": single, "uid": number}
        return {"dim": list(sizes), "stride": list(strides[number]), "data_type": half, "uid": number}

    types = {"io_data_type": half, "intermediate_data_type": single, "compute_data_type": single}
    return cudnn.pygraph(**types, handle=handle), described


def _built(graph: Any, outputs: Mapping[int, dict[str, Any]], tensors: Sequence[Any]) -> Plan | None:
    """The plan of a graph with these outputs, described by their numbers."""
    cudnn = _cudnn()
    for (number, facts), tensor in zip(outputs.items(), tensors, strict=True):
        tensor.set_output(True).set_dim(facts["dim"]).set_stride(facts["stride"]).set_data_type(facts["data_type"])
        tensor.set_uid(number)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError:
        return None
    return Plan(graph=graph, workspace=max(1, graph.get_workspace_size()))
