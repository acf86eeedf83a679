"""Tokens on their way to the experts of a mixture and back, as torch operators on CUDA: hqsweep::dispatch_rows,
sum_rows, combine_rows and combine_rows_backward.

M tokens of D elements choose k of E experts each. Choice c = token * k + rank has its row at places[c] of the M * k
rows that go by expert. Arithmetic is float32, with one order of every sum (formulas: csrc/experts.h); router
has the reference in torch's operators. places is a permutation: the caller's promise, for nobody waits to look.

Where experts are filled up to whole blocks of rows (ops.padding), `starts` is int64 [2, E + 1], where experts begin
without and with those rows; places then are the ones with them, in a matrix of more rows. Rows that fill up are written
as zeros; what stands behind the last expert is left open.
"""

import torch
from torch import Tensor

from hqsweep.ops.addresses import described, empty
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.quantize.kernels import DTYPES

_SOURCES = (torch.float32, torch.bfloat16)


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels move tokens x [M, D] as rows of this dtype."""
    return dtype is torch.bfloat16 and x.dtype in _SOURCES and x.dim() == 2 and x.shape[1] % 8 == 0


def checked(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """x without gaps, at a multiple of 16 bytes; ValueError for another dtype, shape or device than these."""
    if x.dtype not in dtypes or x.shape != shape or x.device != like.device:
        takes = f"it takes {' or '.join(map(str, dtypes))} {tuple(shape)} on {like.device}"
        raise ValueError(f"{name} is {described(x)}; {takes}")
    return (
        x
        if x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.is_neg()
        else x.clone(memory_format=torch.contiguous_format)
    )


def _sizes(places: Tensor, choices: int, dim: int, like: Tensor) -> tuple[Tensor, int]:
    """places, and how many tokens they are of; ValueError for what the kernels cannot take."""
    if choices < 1 or places.numel() % choices or dim % 8:
        takes = "they take int64 [M * k], and elements by 8"
        raise ValueError(f"places are {described(places)} for {choices} choices of tokens of {dim} elements; {takes}")
    return checked("places", places, (torch.int64,), (places.numel(),), like), places.numel() // choices


def rows_of(like: Tensor, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (rows, dim), (dim or 1, 1), dtype)


def _starts(starts: Tensor | None, like: Tensor) -> tuple[int, int]:
    """Their address and the number of experts."""
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
    """x float32 or bfloat16 [M, D] -> bfloat16 [M * k, D], or with starts [count, D]: each token, rounded, at the
    places of its choices."""
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
    """rows bfloat16 [M * k or more, D] -> [M, D] in dtype, float32 or bfloat16: the sum of each token's rows in
    float32, the first choice first, rounded to bfloat16."""
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
    """rows bfloat16 [M * k or more, D], weights float32 [M, k] -> float32 [M, D]: for each token the sum over its
    choices, the first one first, of weight * row; then plus added, bfloat16 [M, D]."""
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
    """dy float32 [M, D] -> the gradients of rows, bfloat16, of weights, float32, and of what was added, bfloat16."""
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
    """checked, of as many rows as places or more."""
    return checked("rows", rows, (torch.bfloat16,), (max(len(rows), places.numel()), rows.shape[-1]), rows)


def _checked_parts(rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if weights.dim() != 2 or rows.dim() != 2:
        raise ValueError(f"rows are {described(rows)} and weights {described(weights)}; both take two axes")
    places, tokens = _sizes(places, weights.shape[1], rows.shape[1], rows)
    weights = checked("weights", weights, (torch.float32,), (tokens, weights.shape[1]), rows)
    return _checked_rows(rows, places), places, weights
