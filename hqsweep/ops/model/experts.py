"""Moving tokens to the experts of a mixture and back, on CUDA: hqsweep::dispatch_rows, sum_rows, combine_rows and
combine_rows_backward.

Each of M tokens of D elements chooses k of E experts. Choice c = token * k + rank has its row at places[c] among the
M * k rows, which are sorted by expert. Arithmetic is float32, with a fixed order of sums (formulas: csrc/experts.h).
nn's router has the reference by torch's operators. The caller guarantees that places is a permutation: checking would
wait for the device.

If experts are padded to whole blocks of rows (ops.members.padding), `starts` is int64 [2, E + 1]: where experts begin
without padding and with it. places then count padding rows. Padding rows are zero, and rows after the last expert are
undefined.
"""

import torch
from torch import Tensor

from hqsweep.ops.addresses import described, empty
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.quantize.kernels import DTYPES

_SOURCES = (torch.float32, torch.bfloat16)


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernels move tokens x [M, D] as rows of this dtype."""
    return dtype is torch.bfloat16 and x.dtype in _SOURCES and x.dim() == 2 and x.shape[1] % 8 == 0


def checked(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return x contiguous at a multiple of 16 bytes. ValueError unless it has one of the dtypes, the shape and like's
    device."""
    if x.dtype not in dtypes or x.shape != shape or x.device != like.device:
        takes = f"it takes {' or '.join(map(str, dtypes))} {tuple(shape)} on {like.device}"
        raise ValueError(f"{name} is {described(x)}; {takes}")
    return (
        x
        if x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.is_neg()
        else x.clone(memory_format=torch.contiguous_format)
    )


def _sizes(places: Tensor, choices: int, dim: int, like: Tensor) -> tuple[Tensor, int]:
    """Return checked places, and the number of tokens. ValueError for sizes that the kernels do not take."""
    if choices < 1 or places.numel() % choices or dim % 8:
        takes = "they take int64 [M * k], and elements by 8"
        raise ValueError(f"places are {described(places)} for {choices} choices of tokens of {dim} elements; {takes}")
    return checked("places", places, (torch.int64,), (places.numel(),), like), places.numel() // choices


def rows_of(like: Tensor, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (rows, dim), (dim or 1, 1), dtype)


def _starts(starts: Tensor | None, like: Tensor) -> tuple[int, int]:
    """Return the address of starts and the number of experts; zeros for None."""
    if starts is None:
        return 0, 0
    if starts.dim() != 2 or starts.shape[1] < 2 or not starts.is_contiguous():
        raise ValueError(f"starts are {described(starts)}; they take contiguous int64 [2, E + 1]")
    return checked("starts", starts, (torch.int64,), (2, starts.shape[1]), like).data_ptr(), starts.shape[1] - 1


@operator(
    "dispatch_rows(Tensor x, Tensor places, SymInt choices, Tensor? starts=None, SymInt count=0) -> Tensor",
    fake=lambda x, places, choices, starts=None, count=0: x.new_empty(
        (places.shape[0] if starts is None else count, x.shape[1]), dtype=torch.bfloat16
    ),
    devices=("CUDA",),
)
def dispatch_rows(x: Tensor, places: Tensor, choices: int, starts: Tensor | None = None, count: int = 0) -> Tensor:
    """Return bfloat16 rows [M * k, D], or [count, D] with starts: each token, rounded, at the places of its choices.

    x: float32 or bfloat16 [M, D].
    """
    dim = x.shape[-1]
    places, tokens = _sizes(places, choices, dim, x)
    x = checked("x", x, _SOURCES, (tokens, dim), x)
    if starts is not None and count < places.numel():
        raise ValueError(f"count is {count}, less than the {places.numel()} choices")
    rows = rows_of(x, tokens * choices if starts is None else count, dim, torch.bfloat16)
    call = (places.data_ptr(), tokens, choices, dim, *_starts(starts, x))
    extension().dispatch_rows_cuda(*call, x.data_ptr(), DTYPES[x.dtype], rows.data_ptr(), *where(x))
    return rows


@operator(
    "sum_rows(Tensor rows, Tensor places, SymInt choices, ScalarType dtype) -> Tensor",
    fake=lambda rows, places, choices, dtype: rows.new_empty((places.shape[0] // choices, rows.shape[1]), dtype=dtype),
    devices=("CUDA",),
)
def sum_rows(rows: Tensor, places: Tensor, choices: int, dtype: torch.dtype) -> Tensor:
    """Return [M, D] in dtype, float32 or bfloat16: each token's rows summed in float32 by choice, rounded to bfloat16.

    rows: bfloat16 [M * k or more, D].
    """
    dim = rows.shape[-1]
    places, tokens = _sizes(places, choices, dim, rows)
    rows = _checked_rows(rows, places)
    if dtype not in _SOURCES:
        raise ValueError(f"dtype is {dtype}; sums are stored as float32 or bfloat16")
    out = rows_of(rows, tokens, dim, dtype)
    call = (places.data_ptr(), tokens, choices, dim, 0, 0)
    extension().sum_rows_cuda(*call, rows.data_ptr(), out.data_ptr(), DTYPES[dtype], *where(rows))
    return out


def _combined(rows, places, weights, added=None):
    return rows.new_empty((weights.shape[0], rows.shape[1]), dtype=torch.float32)


@operator(
    "combine_rows(Tensor rows, Tensor places, Tensor weights, Tensor? added=None) -> Tensor",
    fake=_combined,
    devices=("CUDA",),
)
def combine_rows(rows: Tensor, places: Tensor, weights: Tensor, added: Tensor | None = None) -> Tensor:
    """Return float32 [M, D]: for each token the sum of weight * row over its choices, in order, plus `added`.

    rows: bfloat16 [M * k or more, D]. weights: float32 [M, k]. added: bfloat16 [M, D].
    """
    rows, places, weights = _checked_parts(rows, places, weights)
    (tokens, choices), dim = weights.shape, rows.shape[1]
    if added is not None:
        added = checked("added", added, (torch.bfloat16,), (tokens, dim), rows)
    y = rows_of(rows, tokens, dim, torch.float32)
    call = (places.data_ptr(), tokens, choices, dim, 0, 0, rows.data_ptr(), weights.data_ptr())
    extension().combine_rows_cuda(*call, 0 if added is None else added.data_ptr(), y.data_ptr(), *where(rows))
    return y


def _gradients(dy, rows, places, weights, added, starts=None):
    return [torch.empty_like(rows), torch.empty_like(weights), *([rows.new_empty(dy.shape)] if added else [])]


@operator(
    "combine_rows_backward(Tensor dy, Tensor rows, Tensor places, Tensor weights, bool added, Tensor? starts=None) "
    "-> Tensor[]",
    fake=_gradients,
    devices=("CUDA",),
)
def combine_rows_backward(
    dy: Tensor, rows: Tensor, places: Tensor, weights: Tensor, added: bool, starts: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients of rows (bfloat16), of weights (float32) and, if added, of `added` (bfloat16).

    dy: float32 [M, D].
    """
    rows, places, weights = _checked_parts(rows, places, weights)
    (tokens, choices), (count, dim) = weights.shape, rows.shape
    if starts is None and count != places.numel():
        raise ValueError(f"rows are {count} for {places.numel()} choices; without starts they are as many")
    dy = checked("dy", dy, (torch.float32,), (tokens, dim), rows)
    drows, dweights = rows_of(rows, count, dim, rows.dtype), torch.empty_like(weights)
    gradients = [drows, dweights, *([rows_of(rows, tokens, dim, rows.dtype)] if added else [])]
    call = (places.data_ptr(), tokens, choices, dim, *_starts(starts, rows), rows.data_ptr(), weights.data_ptr())
    addresses = [gradient.data_ptr() for gradient in gradients] + [0] * (3 - len(gradients))
    extension().combine_rows_back_cuda(*call, dy.data_ptr(), *addresses, *where(rows))
    return gradients


def _checked_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return checked rows: at least as many as places."""
    return checked("rows", rows, (torch.bfloat16,), (max(len(rows), places.numel()), rows.shape[-1]), rows)


def _checked_parts(rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if weights.dim() != 2 or rows.dim() != 2:
        raise ValueError(f"rows are {described(rows)} and weights {described(weights)}; both take two axes")
    places, tokens = _sizes(places, weights.shape[1], rows.shape[1], rows)
    weights = checked("weights", weights, (torch.float32,), (tokens, weights.shape[1]), rows)
    return _checked_rows(rows, places), places, weights
