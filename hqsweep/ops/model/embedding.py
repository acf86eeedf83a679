"""Rows of an embedding table by token, and the table's gradient, by the CUDA kernels of csrc/embedding.h.

W ranks may share a table: rank r holds the entries [r * V, (r + 1) * V). A rank then writes the rows of its entries to
other ranks' memory, and receives the rows that it lacks. Gradients travel the other way.
"""

import torch
from torch import Tensor

from hqsweep.ops.library import described, extension, has_kernels, on_its_device, operator, where
from hqsweep.ops.model.experts import checked
from hqsweep.ops.quantize.kernels import DTYPES

WORD = 16
"""Bytes that the kernels load at once; rows are whole words."""
ROWS = (torch.float32, torch.bfloat16)
"""dtypes of row gradients."""


def takes(table: Tensor, tokens: Tensor) -> bool:
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
