"""Operators over a vocabulary: rows of an embedding table, and cross entropy, each with its gradient.

Embedding. Rows of a table by token, and the table's gradient, come from the CUDA kernels of csrc/embedding.h. W ranks
may share a table: rank r holds the entries [r * V, (r + 1) * V). A rank then writes the rows of its entries to other
ranks' memory, and receives the rows that it lacks. Gradients travel the other way.

Cross entropy (hqsweep::cross_entropy_, scale_values_). The gradient overwrites the logits. On CUDA one kernel reads a
row of logits once and writes its gradient. torch's operators are the reference. They also compute inputs that the
kernel does not take, in float32 copies of the logits.

Ranks can share the vocabulary (hqsweep::loss_parts, hqsweep::shared_cross_entropy_). Each rank has the logits of the
entries [first, first + V). For each row it sends four numbers, its part. From all ranks' parts it computes the loss,
and the gradient of its own logits. On CUDA each of these two steps is one kernel. If ranks can write to each other's
memory, a single kernel does both steps and reads the logits once (joint_cross_entropy_).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.experts import checked
from hqsweep.ops.library import described, extension, has_kernels, on_its_device, operator, where
from hqsweep.ops.quantize.kernels import DTYPES

WORD = 16
"""Bytes that the kernels load at once; rows are whole words."""
ROWS = (torch.float32, torch.bfloat16)
"""dtypes of row gradients."""


def takes_table(table: Tensor, tokens: Tensor) -> bool:
    """Return whether the kernels take rows of this table, and compute its gradient."""
    shaped = table.dim() == 2 and table.is_contiguous() and table.shape[1] * table.itemsize % WORD == 0
    usable = table.is_cuda and tokens.is_cuda and has_kernels("cuda")
    # A trace uses torch's operator instead.
    as_it_is = torch.compiler.is_compiling() or (table.data_ptr() % WORD == 0 and not table.is_neg())
    return shaped and usable and as_it_is and table.dtype is torch.float32 and tokens.dtype is torch.int64


@on_its_device
def embed(
    tokens: Tensor,
    table: Tensor,
    *,
    ranks: int = 1,
    rank: int = 0,
    received: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the rows [M, D] of the whole table [W * V, D] for tokens int64 [M].

    This rank's rows come from `table` [V, D]. The others come from received [W - 1, M, D], which holds the rows that
    the other ranks sent, in rank order. A token outside the whole table gets NaN.
    out: receives the rows; without `received`, only the rows of this rank's entries.
    """
    out = table.new_empty(len(tokens), table.shape[1]) if out is None else out
    tokens = tokens.contiguous()
    call = (tokens.data_ptr(), table.data_ptr(), 0 if received is None else received.data_ptr(), out.data_ptr())
    sizes = (len(tokens), len(table), table.shape[1] * table.itemsize, ranks, rank)
    extension().embed_cuda(*call, *sizes, *where(table))
    return out


@on_its_device
def rows_of_rank(tokens: Tensor, rows: Tensor, entries: int, rank: int, out: Tensor) -> None:
    """Copy the rows [M, D] whose tokens belong to a rank's entries to the same rows of `out` [M, D].

    tokens: int64 [M]. entries: the number of entries per rank.
    """
    tokens = tokens.contiguous()
    call = (tokens.data_ptr(), rows.data_ptr(), out.data_ptr(), len(rows), entries, rows.shape[1] * rows.itemsize)
    extension().rows_of_rank_cuda(*call, rank, *where(rows))


def by_entry(tokens: Tensor, entries: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return (order, starts): tokens int64 [N] sorted by this rank's entries, stably; and each entry's first position.

    order: int64 [N]; tokens of other ranks come last. starts: int64 [entries + 1].
    """
    own = tokens - rank * entries
    entry = own.where((own >= 0) & (own < entries), entries).to(torch.int32)
    ordered, order = entry.sort(stable=True)
    every = torch.arange(entries + 1, dtype=torch.int32, device=tokens.device)
    return order, torch.searchsorted(ordered, every)


@on_its_device
def table_gradient(
    rows: Tensor,
    tokens: Tensor,
    order: Tensor,
    starts: Tensor,
    *,
    ranks: int = 1,
    rank: int = 0,
    received: Tensor | None = None,
) -> Tensor:
    """Return the gradient of a table, float32 [V, D], from the gradients of token rows.

    tokens: int64 [W * M]. rows [M, D]: this rank's gradients, float32 or bfloat16. received [W - 1, M, D]: the other
    ranks' gradients. order, starts: by_entry() of the tokens. Rows of an entry are added in float32; their number fixes
    the order.
    """
    entries, width = len(starts) - 1, rows.shape[1]
    table = rows.new_empty(entries, width, dtype=torch.float32)
    rows, tokens = rows.resolve_neg().contiguous(), tokens.contiguous()
    call = (tokens.data_ptr(), order.data_ptr(), starts.data_ptr(), rows.data_ptr())
    others = 0 if received is None else received.data_ptr()
    sizes = (table.data_ptr(), len(rows), entries, width, ranks, rank)
    extension().embedding_gradient_cuda(*call, others, DTYPES[rows.dtype], *sizes, *where(rows))
    return table


@operator(
    "embedding_gradient(Tensor rows, Tensor tokens, SymInt entries) -> Tensor",
    fake=lambda rows, tokens, entries: rows.new_empty((entries, rows.shape[1]), dtype=torch.float32),
    devices=("CUDA",),
)
def embedding_gradient(rows: Tensor, tokens: Tensor, entries: int) -> Tensor:
    """Return the gradient of a whole table with this many entries. rows: [M, D]; tokens: int64 [M]."""
    if rows.dim() != 2 or rows.dtype not in ROWS or rows.shape[1] * rows.itemsize % WORD:
        raise ValueError(
            f"rows are {described(rows)}; they take float32 or bfloat16 [M, D] of whole words of {WORD} bytes"
        )
    tokens = checked("tokens", tokens, (torch.int64,), (len(rows),), rows)
    rows = checked("rows", rows, ROWS, tuple(rows.shape), rows)
    return table_gradient(rows, tokens, *by_entry(tokens, entries))


MULTIPLE = 8
"""Logits that the kernel loads at once, 16 bytes. The vocabulary must be a multiple of it."""
IGNORED = -100
"""The target of a row without a loss, as in torch's cross_entropy (csrc/loss.h)."""
SCALED = (torch.float32, torch.bfloat16)
"""dtypes that scale_values_ takes."""


@operator(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor scale, bool gradient, Tensor(b!)? amax=None) -> Tensor",
    fake=lambda logits, targets, scale, gradient, amax=None: logits.new_empty(logits.shape[0], dtype=torch.float32),
    devices=("CUDA",),
)
def _cross_entropy(
    logits: Tensor, targets: Tensor, scale: Tensor, gradient: bool, amax: Tensor | None = None
) -> Tensor:
    """Run cross_entropy_ by the kernel; ValueError for inputs that it does not take.

    logits: bfloat16 [M, V], contiguous, at a multiple of 16 bytes, V a multiple of 8. targets: int64 [M], contiguous.
    scale, amax: one float32 each.
    """
    check_loss(logits, targets, scale)
    rows, vocabulary = logits.shape
    if amax is not None:
        _check_one("amax", amax, logits)
    losses = logits.new_empty(rows, dtype=torch.float32)
    call = (logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), rows, vocabulary)
    at = (scale.data_ptr(), gradient, 0 if amax is None else amax.data_ptr())
    extension().cross_entropy_cuda(*call, *at, *where(logits))
    return losses


def check_loss(logits: Tensor, targets: Tensor, scale: Tensor | None = None) -> None:
    """Raise ValueError for logits, targets or a scale that the kernels do not take."""
    if not takes_logits(logits):
        wanted = f"it takes bfloat16 [M, V], contiguous, at a multiple of 16 bytes, V a multiple of {MULTIPLE}"
        raise ValueError(f"logits are {described(logits)}; {wanted}")
    rows = len(logits)
    readable = targets.dtype == torch.int64 and targets.shape == (rows,) and targets.is_contiguous()
    if not readable or targets.device != logits.device:
        raise ValueError(f"targets are {described(targets)}; they are int64 [{rows}], contiguous, on {logits.device}")
    if scale is not None:
        _check_one("scale", scale, logits)


def _check_one(name: str, value: Tensor, logits: Tensor) -> None:
    if value.dtype != torch.float32 or value.numel() != 1 or value.device != logits.device:
        raise ValueError(f"{name} is {described(value)}; it is one float32 on {logits.device}")


def takes_logits(logits: Tensor) -> bool:
    """Return whether the CUDA kernel takes logits of this dtype, shape and alignment.

    A trace knows no address; its allocations start at multiples of 16 bytes.
    """
    whole = logits.dtype == torch.bfloat16 and logits.dim() == 2 and logits.is_contiguous()
    return whole and logits.shape[1] % MULTIPLE == 0 and (torch.compiler.is_compiling() or logits.data_ptr() % 16 == 0)


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: Tensor, *, gradient: bool, amax: Tensor | None = None
) -> Tensor:
    """Return the cross entropy of each row, float32 [M]: log(sum_v exp(x_v)) - x_target.

    logits: [M, V]. targets: int64 [M]; a row with target IGNORED has loss and gradient 0.
    gradient: overwrite each row of logits by (softmax(x)_v - [v = target]) * scale, computed in float32 and rounded
    once.
    scale: float32 [] on the logits' device. amax: float32 [1, 1], raised to the gradient's largest magnitude without
    NaN.

    On CUDA, one kernel call reads and writes logits that `takes` accepts. Its sums have a fixed order that differs from
    torch's. There, a target outside the vocabulary gives NaN as loss and gradient; torch's operators refuse it.
    """
    if logits.is_cuda and has_kernels("cuda") and takes_logits(logits):
        return _cross_entropy(logits, targets, scale, gradient, amax)
    logs, counted = torch.log_softmax(logits.float(), dim=1), targets != IGNORED
    places = torch.arange(len(targets), device=targets.device), targets.where(counted, 0)
    losses = (-logs[places]).where(counted, 0.0)
    if gradient:
        softmax = logs.exp_()
        softmax[places] -= 1.0  # scatter_add_ can be refused under deterministic algorithms
        logits.copy_(softmax.mul_(scale.where(counted, 0.0)[:, None]))
        if amax is not None and logits.numel():
            torch.maximum(amax, logits.abs().nan_to_num(0.0).max(), out=amax)
    return losses


@operator(
    "scale_values_(Tensor(a!) values, Tensor factor) -> ()",
    fake=lambda values, factor: None,
    devices=("CUDA",),
)
def _scale_values(values: Tensor, factor: Tensor) -> None:
    """Run scale_ by the kernel; ValueError for inputs that it does not take."""
    if values.dtype not in SCALED or not values.is_contiguous():
        raise ValueError(f"values are {described(values)}; it takes float32 or bfloat16, contiguous")
    if factor.dtype != torch.float32 or factor.numel() != 1 or factor.device != values.device:
        raise ValueError(f"the factor is {described(factor)}; it is one float32 on {values.device}")
    call = (values.data_ptr(), DTYPES[values.dtype], values.numel(), factor.data_ptr())
    extension().scale_values_cuda(*call, *where(values))


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """Multiply values by factor, float32 [], in place, and return them.

    On CUDA a factor of 1 costs no memory traffic, and nothing waits to read it.
    """
    if values.is_cuda and has_kernels("cuda") and values.is_contiguous() and values.dtype in SCALED:
        _scale_values(values, factor)
        return values
    return values.mul_(factor)


NUMBERS = 4
"""Numbers in a part: the largest logit, sum(exp(x - largest)), the target's logit if it is here, and whether it is."""


@operator(
    "loss_parts(Tensor logits, Tensor targets, int first) -> Tensor",
    fake=lambda logits, targets, first: logits.new_empty((logits.shape[0], NUMBERS), dtype=torch.float32),
    devices=("CUDA",),
)
def _loss_parts(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Run loss_parts by the kernel; ValueError for inputs that check_loss refuses."""
    check_loss(logits, targets)
    rows, vocabulary = logits.shape
    parts = logits.new_empty((rows, NUMBERS), dtype=torch.float32)
    call = (logits.data_ptr(), targets.data_ptr(), parts.data_ptr(), rows, vocabulary, first)
    extension().loss_parts_cuda(*call, *where(logits))
    return parts


def loss_parts(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Return float32 [M, 4]: max(x), sum(exp(x - max(x))), the target's logit or 0, and 1 if this rank has the target,
    else 0.

    logits [M, V]: the entries [first, first + V). targets int64 [M]: indices into the whole vocabulary.
    A NaN enters the sum but is never the maximum. A row with only -inf has a sum of 0.
    """
    if logits.is_cuda and has_kernels("cuda") and takes_logits(logits):
        return _loss_parts(logits, targets, first)
    x, own = logits.float(), targets - first
    largest = x.masked_fill(x.isnan(), -torch.inf).amax(1)
    total = (x - _base(largest)[:, None]).exp().sum(1)
    has = (own >= 0) & (own < x.shape[1])
    rows = torch.arange(len(x), device=x.device)
    of_target = x[rows, own.where(has, 0)].where(has, 0.0)
    return torch.stack([largest, total, of_target, has.float()], dim=1)


@operator(
    "shared_cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor parts, int first, Tensor scale, bool gradient)"
    " -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32),
    devices=("CUDA",),
)
def _shared(logits: Tensor, targets: Tensor, parts: Tensor, first: int, scale: Tensor, gradient: bool) -> Tensor:
    """Run shared_cross_entropy_ by the kernel. ValueError for non-contiguous parts, and for what check_loss refuses."""
    check_loss(logits, targets, scale)
    rows, vocabulary = logits.shape
    shaped = parts.dim() == 3 and parts.shape[1:] == (rows, NUMBERS) and len(parts) > 0
    if parts.dtype != torch.float32 or not shaped or not parts.is_contiguous() or parts.device != logits.device:
        wanted = f"float32 [ranks, {rows}, {NUMBERS}], contiguous, on {logits.device}"
        raise ValueError(f"parts are {described(parts)}; they are {wanted}")
    losses = logits.new_empty(rows, dtype=torch.float32)
    call = (logits.data_ptr(), targets.data_ptr(), parts.data_ptr(), losses.data_ptr(), rows, vocabulary, first)
    extension().shared_cross_entropy_cuda(*call, len(parts), scale.data_ptr(), gradient, *where(logits))
    return losses


def shared_cross_entropy_(
    logits: Tensor, targets: Tensor, parts: Tensor, first: int, scale: Tensor, *, gradient: bool
) -> Tensor:
    """Return the cross entropy of each row over the whole vocabulary, float32 [M], equal on all ranks.

    logits [M, V]: this rank's entries. parts [W, M, 4]: loss_parts() of all W ranks, summed in rank order.
    gradient: overwrite each row of logits by (softmax(x)_v - [v = target]) * scale, with the whole softmax. A row with
    target IGNORED has loss and gradient 0. A target that no rank has gives NaN for both.
    """
    if logits.is_cuda and has_kernels("cuda") and takes_logits(logits):
        return _shared(logits, targets, parts.contiguous(), first, scale, gradient)
    largest = parts[..., 0].amax(0)
    total = torch.zeros_like(largest)
    for part in parts:
        same = part[:, 0] == largest
        total += part[:, 1].where(same, part[:, 1] * (part[:, 0] - largest).exp())
    of_target = torch.full_like(largest, torch.nan)
    for part in parts:
        of_target = part[:, 2].where(part[:, 3] != 0, of_target)
    counted = targets != IGNORED
    if gradient:
        softmax = (logits.float() - _base(largest)[:, None]).exp_().div_(total[:, None])
        own = targets - first
        has = (own >= 0) & (own < logits.shape[1])
        rows = torch.arange(len(own), device=own.device)
        own = own.where(has, 0)
        softmax[rows, own] -= has.float()  # allowed under deterministic algorithms
        scale = scale.where(~of_target.isnan(), torch.nan).where(counted, 0.0)
        logits.copy_(softmax.mul_(scale[:, None]))
    return (total.log() + (largest - of_target)).where(counted, 0.0)


MOST_RANKS = 16
"""Ranks of a joint cross entropy (csrc/loss.h)."""


class Boxes(NamedTuple):
    """Memory on all ranks' GPUs through which kernels exchange parts (csrc/loss.h, loss_mailbox)."""

    address: int
    """The address, on this rank's device, of a table with the addresses of the ranks' boxes."""
    state: Tensor
    """uint32 [3]."""
    rows: int
    """The number of rows that fit in a box."""
    ranks: int
    rank: int


@on_its_device
def joint_cross_entropy_(logits: Tensor, targets: Tensor, boxes: Boxes, scale: Tensor) -> Tensor | None:
    """Return shared_cross_entropy_ with its gradient, to the bit, by one kernel on every rank that exchanges parts
    itself.

    Rank r has the entries [r * V, (r + 1) * V). None, and nothing is done, if the kernel does not take the logits.
    """
    if not (has_kernels("cuda") and takes_logits(logits)):
        return None
    check_loss(logits, targets, scale)
    rows, vocabulary = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    told = (boxes.address, boxes.state.data_ptr(), rows, vocabulary)
    call = (logits.data_ptr(), targets.data_ptr(), losses.data_ptr(), *told)
    options = (boxes.rank * vocabulary, boxes.rows, boxes.ranks, boxes.rank, scale.data_ptr())
    return losses if extension().joint_cross_entropy_cuda(*call, *options, *where(logits)) else None


def _base(largest: Tensor) -> Tensor:
    """Return the value to subtract from logits: the maximum, or 0 if all are -inf, since -inf - -inf is NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)
