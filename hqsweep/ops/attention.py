"""Attention on CUDA and on the CPU: rotary positions, and attention whose results repeat to the bit.

Rotary positions (hqsweep::rope, rope_, join_heads). In a head of E elements the pair (2i, 2i + 1) turns by
t * base^(-2i/E) at position t (Su et al., arXiv 2104.09864):
  (a, b) -> (fl(fl(a c) - fl(b s)), fl(fl(a s) + fl(b c))), c and s being cos and sin of the angle,
in float32, rounded once to bfloat16. nn.rope.rotate is the reference, and computes other devices. Bits do not depend on
other work on the GPU, nor on CUDA graphs.

Attention. Operators are cuDNN's deterministic backward (hqsweep::attention_back), its forward into given memory, and
torch's flash attention on the CPU (hqsweep::attention_on_cpu). torch calls cuDNN's other backward, which adds up the
gradient of q in the order in which thread blocks finish. The deterministic one writes the gradients of scores to
memory, 2 bytes each, and multiplies them by k (nvidia-cudnn-frontend, use_deterministic_algorithm). On a Hopper it
takes half the time of flash attention's backward. If the scores need too much memory, batch and heads are split into
parts, which does not change bits. If a single head needs too much, flash attention computes the gradients.

On the CPU, traced graphs need an operator of ours. torch tags its own operator as random, although there is no dropout
here. For a random operator that backward recomputes, torch.compile keeps the generator's state. torch 2.13 confuses
this state with the DeviceMesh that backward needs if parameters are DTensors.
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
from hqsweep.ops.library import described, empty, extension, operator, where
from hqsweep.ops.quantize.kernels import DTYPES
from hqsweep.torch_private import (
    current_raw_stream,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)

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


def _joined_heads(dq: Tensor, dk: Tensor, dv: Tensor, base: float | None) -> Tensor:
    sequences, heads, positions, width = dq.shape
    return dq.new_empty((sequences, positions, 3 * heads * width))


@operator("join_heads(Tensor dq, Tensor dk, Tensor dv, float? base) -> Tensor", fake=_joined_heads, devices=("CUDA",))
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


CUDNN_FRONTEND = "nvidia-cudnn-frontend"
MOST_SCORES = 1 << 29
"""Gradients of scores in memory at once: 1 GiB."""
_PADDED = 128
"""Rows and columns of scores are padded to a multiple of this."""
Sizes = tuple[int, ...]
SUMS = 5
"""The index of `sums` among a plan's tensors: do, q, k, v, o, sums, then the gradients of q, k and v."""


def flash_back(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, is_causal: bool) -> list[Tensor]:
    """Return the gradients of q, k and v by flash attention. They repeat if torch uses deterministic algorithms."""
    unused = q.new_empty(0, dtype=torch.int64)  # dropout's state
    length = q.shape[2]
    gradients = flash_attention_backward(
        do, q, k, v, o, sums, None, None, length, length, 0.0, is_causal, unused, unused
    )
    return list(gradients)


def frontend_version() -> str | None:
    """Return the version of CUDNN_FRONTEND, or None if it is not installed. Gradients' bits depend on it."""
    try:
        return version(CUDNN_FRONTEND)
    except PackageNotFoundError:
        return None


@constant_result
def has_cudnn() -> bool:
    """Return whether cuDNN's frontend can be imported."""
    return _cudnn() is not None


@memo
def _cudnn() -> ModuleType | None:
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError, RuntimeError):  # not installed, or without cuDNN
        return None


def _gradient_of_joined(do: Tensor, q: Tensor, *others: Any) -> Tensor:
    sequences, heads, length, width = q.shape
    return q.new_empty((sequences, length, 3, heads, width))


@operator(
    "attention_back(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor sums, bool is_causal) -> Tensor",
    fake=_gradient_of_joined,
    devices=("CUDA",),
)
def attention_back(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, is_causal: bool) -> Tensor:
    """Return the gradients of q, k and v, bfloat16 [B, T, 3, H, E], for scores q k^T / sqrt(E).

    do, q, k, v, o: bfloat16 [B, H, T, E] with any strides. sums: float32 [B, H, T], the logarithm of each row's sum of
    exponentials.
    """
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
    """Write the output and the sums to o and sums, in the form that attention_back() reads. Return whether it could.

    False, and nothing is written, if cuDNN does not take these tensors. On CUDA; requires has_cudnn().
    """
    tensors = dict(enumerate((q, k, v, o, sums), start=1))
    strides = tuple(x.stride() for x in tensors.values())
    read = all(map(readable, (q, o))) and not (k.is_neg() or v.is_neg())
    plan = read and _plan_forward(q.get_device(), tuple(q.shape), strides, is_causal)
    if plan:
        plan.run(tensors, empty(q, (plan.workspace,), (1,), torch.uint8))
    return bool(plan)


def _readable(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if its rows have gaps or repeat values."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return x if readable(x) and all(strides) else x.resolve_neg().contiguous()


def _part(shape: Sizes) -> Sizes | None:
    """Return the largest part of [B, H, T, E] whose scores fit in memory. None if a single head does not fit."""
    sequences, heads, length, width = shape
    fitting = MOST_SCORES // (-(-length // _PADDED) * _PADDED) ** 2
    if fitting >= heads:
        return _divisor(sequences, fitting // heads), heads, length, width
    return (1, _divisor(heads, fitting), length, width) if fitting else None


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A cuDNN graph for numbered tensors of one shape and one set of strides."""

    graph: Any
    workspace: int
    """Size in bytes."""

    def run(self, tensors: Mapping[int, Tensor], workspace: Tensor) -> None:
        """Run the graph on the current stream. Each tensor gives the address of its first element."""
        device = workspace.get_device()
        handle = _handle(device, threading.get_ident())
        _cudnn().set_stream(handle, current_raw_stream(device))
        addresses = {number: x.data_ptr() for number, x in tensors.items()}
        self.graph.execute(addresses, workspace.data_ptr(), handle)


@memo
def _handle(device: int, thread: int) -> Any:
    """Return cuDNN's handle for a thread on the current device. Threads must not share a handle."""
    return _cudnn().create_handle()


@memo
def _plan(device: int, sizes: Sizes, strides: tuple[Sizes, ...], is_causal: bool) -> Plan | None:
    """Return the plan for do, q, k, v, o, sums and the gradients of q, k and v. None if cuDNN has none."""
    graph, described = _graph(device, sizes, dict(enumerate(strides)))
    do, q, k, v, o, stats = (graph.tensor(**described(number)) for number in range(SUMS + 1))
    gradients = graph.sdpa_backward(
        q=q, k=k, v=v, o=o, dO=do, stats=stats, attn_scale=sizes[3] ** -0.5, use_causal_mask=is_causal,
        use_deterministic_algorithm=True,
    )  # fmt: skip
    return _built(graph, {number: described(number) for number in range(SUMS + 1, len(strides))}, gradients)


@memo
def _plan_forward(device: int, sizes: Sizes, strides: tuple[Sizes, ...], is_causal: bool) -> Plan | None:
    """Return the plan for q, k, v, o and sums. None if cuDNN has none."""
    graph, described = _graph(device, sizes, dict(enumerate(strides, start=1)))
    q, k, v = (graph.tensor(**described(number)) for number in range(1, 4))
    scale = sizes[3] ** -0.5
    outputs = graph.sdpa(q=q, k=k, v=v, attn_scale=scale, use_causal_mask=is_causal, generate_stats=True)
    return _built(graph, {number: described(number) for number in (SUMS - 1, SUMS)}, outputs)


def _graph(device: int, sizes: Sizes, strides: Mapping[int, Sizes]) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """Return an empty graph, and a function that describes its tensors by number."""
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
    """Return the plan of a graph with these outputs (number -> description). None if cuDNN does not support it."""
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


AXES = 4


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return flash_attention_on_cpu(q, k, v, 0.0, is_causal)


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
    return flash_attention_on_cpu_backward(do, *saved, 0.0, is_causal)
