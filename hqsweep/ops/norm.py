"""The norms of csrc/norm.h as torch operators on CUDA: hqsweep::norm and hqsweep::norm_backward.

sum = x + branch; h = (sum - mean) * rstd * gain + bias, without mean and bias for RMSNorm. Sums over a row are float32
with an order of their own; h is rounded once. A row is the last axis. Inputs may have any strides.

A branch, or the gradient of h, may be a sum over W ranks whose bfloat16 summands are all here. The argument then is
this rank's summand, `rank` its number, and `received` [W - 1, ...] the other ranks' summands in rank order. They are
added as in ops.sum_parts.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hqsweep.ops.library import described, extension, on_its_device, operator, where
from hqsweep.ops.quantize.kernels import DTYPES

UNIT = 4
MOST_COLS = 6144
"""The largest row width, a multiple of UNIT (csrc/norm.h)."""
STRIP = 16
MOST_MEASURED = 3072
"""The largest row width for which amaxes are found, with a multiple of STRIP rows."""
STREAMS = (torch.float32, torch.bfloat16)
"""dtypes of x, branch and h."""
BLOCKS_EACH = 2
"""Thread blocks of the backward pass per multiprocessor; they all run at once."""


def takes(x: Tensor, branch: Tensor | None, gain: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the operators take these tensors, with h in dtype."""
    fits = x.dim() > 0 and 0 < x.shape[-1] <= MOST_COLS and x.shape[-1] % UNIT == 0
    types = x.dtype in STREAMS and dtype in STREAMS and gain.dtype == torch.float32
    return fits and types and (branch is None or (branch.dtype in STREAMS and branch.shape == x.shape))


def measures(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `norm` can find amaxes for x in dtype. takes() must hold."""
    return dtype is torch.bfloat16 and x.shape[-1] <= MOST_MEASURED and x.numel() // x.shape[-1] % STRIP == 0


def _check(name: str, tensor: Tensor | None, like: Tensor, shape: tuple[int, ...], dtypes: tuple) -> None:
    """Raise ValueError for a tensor that the kernels cannot read."""
    if tensor is None:
        return
    if tensor.dtype not in dtypes or tensor.shape != shape or tensor.device != like.device:
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} is {described(tensor)}; it takes {allowed} {tuple(shape)} on {like.device}")


def _check_summands(name: str, own: Tensor | None, received: Tensor | None, rank: int) -> None:
    """Raise ValueError if other ranks' summands do not fit this rank's own."""
    if received is None:
        return
    if own is None:
        raise ValueError(f"there are summands of other ranks, and no {name}")
    _check(f"received of {name}", received, own, (len(received), *own.shape), (torch.bfloat16,))
    ours = own.dtype is torch.bfloat16 and received.is_contiguous() and 0 <= rank <= len(received)
    if not len(received) or not ours:
        wanted = f"contiguous, of a {name} in bfloat16, of a rank up to the number of them"
        raise ValueError(f"received of {name} is {described(received)} of rank {rank}; it takes summands {wanted}")


def _check_place(name: str, tensor: Tensor, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless a kernel can write a tensor of like's shape, in one of the dtypes, to this place."""
    _check(name, tensor, like, like.shape, dtypes)
    if not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ValueError(f"{name} is {described(tensor)}; it is contiguous, at a multiple of 16 bytes")


def _check_rows(x: Tensor) -> None:
    cols = x.shape[-1] if x.dim() else 0
    if x.dtype not in STREAMS or not 0 < cols <= MOST_COLS or cols % UNIT or not x.is_cuda:
        takes = f"float32 or bfloat16 on a GPU with rows of a multiple of {UNIT} elements up to {MOST_COLS}"
        raise ValueError(f"x is {described(x)}; it takes {takes}")


def ready(tensor: Tensor) -> Tensor:
    """Return the tensor compact and aligned to 16 bytes."""
    tensor = tensor.resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _address(tensor: Tensor | None = None) -> tuple[int, int]:
    """Return the address and the dtype's number; zeros for None."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), DTYPES[tensor.dtype])


def _ranks(received: Tensor | None, rank: int) -> tuple[int, int, int]:
    """Return the address of the other ranks' summands, the number of ranks, and this rank; (0, 1, 0) for None."""
    return (0, 1, 0) if received is None else (received.data_ptr(), 1 + len(received), rank)


def _compact(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _statistics(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((1 if bias is None else 2, x.numel() // x.shape[-1]), dtype=torch.float32)


def _outputs(x: Tensor, branch: Tensor | None, bias: Tensor | None, dtype: torch.dtype, amaxes: int) -> list[Tensor]:
    summed = [] if branch is None else [_compact(x, x.dtype)]
    extra = [x.new_empty((1, 1), dtype=torch.float32) for _ in range(amaxes)]
    return [_compact(x, dtype), _statistics(x, bias), *summed, *extra]


def _fake(x, branch, gain, bias, epsilon, dtype, amax=False, signs=None, received=None, rank=0):
    return _outputs(x, branch, bias, dtype, amax + (signs is not None))


@operator(
    "norm(Tensor x, Tensor? branch, Tensor gain, Tensor? bias, float epsilon, ScalarType dtype, bool amax=False, "
    "bool? signs=None, Tensor? received=None, int rank=0) -> Tensor[]",
    fake=_fake,
    devices=("CUDA",),
)
def norm(
    x: Tensor,
    branch: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    amax: bool = False,
    signs: bool | None = None,
    received: Tensor | None = None,
    rank: int = 0,
) -> list[Tensor]:
    """Return [h, statistics], then the sum in x's dtype if there is a branch, then the wanted amaxes.

    x: [..., D] float32 or bfloat16; branch alike. gain, bias: float32 [D]. h: [..., D] in dtype. statistics: float32
    [1, rows] rstd, or with a bias (LayerNorm) [2, rows] rstd and mean.
    amax: find the largest magnitude of h, float32 [1, 1]; NaN is ignored. signs, unless None: also find the amax of h's
    columns [rows, D] after the random Hadamard transform of each 16 rows, rounded to bfloat16. True: with the fixed
    signs.
    received, rank: for a branch that is a sum over ranks.

    Raises:
        ValueError: for other shapes, dtypes and devices, a D that is no multiple of 4 or above 6144, amaxes that
            measures() does not allow, and amaxes with received.
    """
    _check_rows(x)
    if dtype not in STREAMS:
        raise ValueError(f"dtype is {dtype}; a norm is rounded to float32 or bfloat16")
    if (amax and not measures(x, dtype)) or (signs is not None and not amax):
        takes = f"bfloat16, of a multiple of {STRIP} rows of at most {MOST_MEASURED} elements, signs with amax=True"
        raise ValueError(f"amaxes of {described(x)} in {dtype} are wanted; they are found in {takes}")
    if amax and received is not None:
        raise ValueError("amaxes are found where the branch is whole, and it has summands of other ranks")
    return _run(x, branch, gain, bias, epsilon, dtype, amax, signs, received, rank)


@on_its_device
def norm_copied(x: Tensor, *of_norm: Any, copies: Sequence[Tensor]) -> list[Tensor]:
    """Return norm(x, *of_norm) without amaxes, and also write h to up to 15 tensors of its shape and dtype.

    The copies may be memory of other GPUs. This is no operator: a trace knows no other ranks.
    """
    return _run(x, *of_norm, copies=copies)


def _run(
    x, branch, gain, bias, epsilon, dtype, amax=False, signs=None, received=None, rank=0, copies=()
) -> list[Tensor]:
    """Return the outputs of norm() or norm_statistics(). dtype: None if h is not wanted."""
    _check_rows(x)
    _check("branch", branch, x, x.shape, STREAMS)
    _check_summands("branch", branch, received, rank)
    for copy in copies:
        _check_place("a copy", copy, x, (dtype,))
    for name, tensor in (("gain", gain), ("bias", bias)):
        _check(name, tensor, x, x.shape[-1:], (torch.float32,))
    summed = [] if branch is None else [_compact(x, x.dtype)]
    amaxes = [x.new_zeros((1, 1), dtype=torch.float32) for _ in range(amax + (signs is not None))]
    h, statistics = [] if dtype is None else [_compact(x, dtype)], _statistics(x, bias)
    outputs = [*h, statistics, *summed, *amaxes]
    x, gain = ready(x), ready(gain)
    branch, bias = (None if tensor is None else ready(tensor) for tensor in (branch, bias))
    shape = (statistics.shape[1], x.shape[-1])
    call = (*_address(x), *_address(branch), gain.data_ptr(), _address(bias)[0], epsilon, *shape)
    to = (_address(*summed)[0], *_address(*h), statistics.data_ptr())
    amax_addresses = [amax.data_ptr() for amax in amaxes] + [0] * (2 - len(amaxes))
    others = (*_ranks(received, rank), [copy.data_ptr() for copy in copies])
    extension().norm_forward_cuda(*call, *to, *amax_addresses, bool(signs), *others, *where(x))
    return outputs


@operator(
    "norm_statistics(Tensor x, Tensor? branch, Tensor gain, Tensor? bias, float epsilon) -> Tensor[]",
    fake=lambda x, branch, gain, bias, epsilon: _outputs(x, branch, bias, x.dtype, 0)[1:],
    devices=("CUDA",),
)
def norm_statistics(
    x: Tensor, branch: Tensor | None, gain: Tensor, bias: Tensor | None, epsilon: float
) -> list[Tensor]:
    """Return the outputs of `norm` without h: the statistics, and with a branch the sum."""
    return _run(x, branch, gain, bias, epsilon, None)


def check_normed(total: Tensor, gain: Tensor, bias: Tensor | None, statistics: Tensor) -> None:
    """Raise ValueError for a bfloat16 sum [rows, D], gain, bias or statistics that the kernels cannot read."""
    _check_rows(total)
    if total.dim() != 2 or total.dtype is not torch.bfloat16:
        raise ValueError(f"total is {described(total)}; it takes bfloat16 with two axes")
    rows, cols = total.shape
    for name, tensor in (("gain", gain), ("bias", bias)):
        _check(name, tensor, total, (cols,), (torch.float32,))
    _check("statistics", statistics, total, (1 if bias is None else 2, rows), (torch.float32,))


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _gradients(total: Tensor, statistics: Tensor, branch_dtype: torch.dtype | None) -> list[Tensor]:
    dgain = total.new_empty((statistics.shape[0], total.shape[-1]), dtype=torch.float32)
    return [_compact(total, total.dtype), dgain, *([] if branch_dtype is None else [_compact(total, branch_dtype)])]


def _fake_backward(dh, total, dtotal, gain, statistics, branch_dtype, received=None, rank=0):
    return _gradients(total, statistics, branch_dtype)


@operator(
    "norm_backward(Tensor dh, Tensor total, Tensor? dtotal, Tensor gain, Tensor statistics, ScalarType? branch_dtype, "
    "Tensor? received=None, int rank=0) -> Tensor[]",
    fake=_fake_backward,
    devices=("CUDA",),
)
def norm_backward(
    dh: Tensor,
    total: Tensor,
    dtotal: Tensor | None,
    gain: Tensor,
    statistics: Tensor,
    branch_dtype: torch.dtype | None,
    received: Tensor | None = None,
    rank: int = 0,
) -> list[Tensor]:
    """Return the gradients of `norm`: dx in total's dtype, parameter gradients, and dx in branch_dtype unless that is
    None.

    dh: the gradient of h. total: the sum (x without a branch). dtotal: the gradient of the sum, or None.
    Parameter gradients are float32 [1, D] for the gain; with two statistics [2, D] for gain and bias. The order of sums
    over rows depends on the number of rows and of multiprocessors. received, rank: for a dh that is a sum over ranks.
    ValueError as for `norm`.
    """
    return _run_backward(dh, total, dtotal, gain, statistics, branch_dtype, received, rank)


@on_its_device
def norm_backward_to(dh: Tensor, *of_norm: Any, place: Tensor) -> list[Tensor]:
    """Return norm_backward(dh, *of_norm) with branch_dtype=None, and also write dx to `place`, in place's dtype.

    `place` has the shape of dx. This is no operator, like norm_copied.
    """
    return _run_backward(dh, *of_norm, place=place)


def _run_backward(dh, total, dtotal, gain, statistics, branch_dtype, received, rank, place=None) -> list[Tensor]:
    _check_rows(total)
    rows, cols = total.numel() // total.shape[-1], total.shape[-1]
    _check("dh", dh, total, total.shape, STREAMS)
    _check_summands("dh", dh, received, rank)
    _check("dtotal", dtotal, total, total.shape, (total.dtype,))
    _check("gain", gain, total, (cols,), (torch.float32,))
    _check("statistics", statistics, total, (2 if statistics.shape[:1] == (2,) else 1, rows), (torch.float32,))
    if branch_dtype not in (None, *STREAMS):
        raise ValueError(f"branch_dtype is {branch_dtype}; a gradient is rounded to float32 or bfloat16")
    outputs = _gradients(total, statistics, branch_dtype)
    dx, dgain, dbranch = (*outputs, place)[:3]
    if place is not None:
        _check_place("place", place, total, STREAMS)
    blocks = min(rows, BLOCKS_EACH * _multiprocessors(total.get_device()))
    partials = dgain.new_empty((len(statistics), blocks, cols))
    dh, total, gain, statistics = (ready(tensor) for tensor in (dh, total, gain, statistics))
    dtotal = None if dtotal is None else ready(dtotal)
    call = (*_address(dh), *_address(total), _address(dtotal)[0], gain.data_ptr(), statistics.data_ptr(), rows, cols)
    to = (dx.data_ptr(), *_address(dbranch), len(statistics) == 2, partials.data_ptr(), blocks, dgain.data_ptr())
    extension().norm_backward_cuda(*call, *to, *_ranks(received, rank), *where(total))
    return outputs
