"""Rows of a table by tokens, and the table's gradient, by the kernels of csrc/embedding.h, on CUDA.

The entries of a table may lie over W ranks, of which rank r has [r * V, (r + 1) * V). A rank then writes the rows of
its entries to other ranks' memory, and takes from them those that it lacks; gradients go the other way.
"""

import torch
from torch import Tensor

from hqsweep.ops.addresses import described
from hqsweep.ops.library import extension, has_kernels, on_its_device, operator, where
from hqsweep.ops.model.experts import checked
from hqsweep.ops.quantize.kernels import DTYPES

WORD = 16
"""Bytes of one load of the kernels; rows are whole words."""
ROWS = (torch.float32, torch.bfloat16)
"""The dtypes of rows whose gradients are added."""


def takes(table: Tensor, tokens: Tensor) -> bool:
    """Whether the kernels take rows of this table, and give its gradient."""
    shaped = table.dim() == 2 and table.is_contiguous() and table.shape[1] * table.itemsize % WORD == 0
    usable = table.is_cuda and tokens.is_cuda and has_kernels("cuda")
    # A trace takes its rows by torch.
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
    """tokens int64 [M], table [V, D] -> rows [M, D] of the whole table [W * V, D]: this rank's from `table`, those of
    others from received [W - 1, M, D], which has what the other ranks, in their order, have of them. A token of no rank
    has a row of NaN. out: gets the rows; without received, those of this rank's entries alone."""
    out = table.new_empty(len(tokens), table.shape[1]) if out is None else out
    tokens = tokens.contiguous()
    call = (tokens.data_ptr(), table.data_ptr(), 0 if received is None else received.data_ptr(), out.data_ptr())
    sizes = (len(tokens), len(table), table.shape[1] * table.itemsize, ranks, rank)
    extension().embed_cuda(*call, *sizes, *where(table))
    return out


@on_its_device
def rows_of_rank(tokens: Tensor, rows: Tensor, entries: int, rank: int, out: Tensor) -> None:
    """Copy those of rows [M, D] whose tokens int64 [M] have an entry of a rank, each of which has so many, to `out` as
    [M, D]."""
    tokens = tokens.contiguous()
    call = (tokens.data_ptr(), rows.data_ptr(), out.data_ptr(), len(rows), entries, rows.shape[1] * rows.itemsize)
    extension().rows_of_rank_cuda(*call, rank, *where(rows))


def by_entry(tokens: Tensor, entries: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N] in the order of this rank's entries, those of an entry in their order, and others behind them:
    int64 [N]; and where each entry's begin in it: int64 [entries + 1]."""
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
    """The gradient of a table, float32 [V, D], from those of the rows of tokens int64 [W * M], of which each rank has
    the gradients of M: rows [M, D] in float32 or bfloat16, and received [W - 1, M, D], that of the other ranks. order,
    starts: by_entry() of the tokens. Rows of an entry are added in float32, in an order that their number decides."""
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
    """table_gradient() of a whole table of so many entries, from the rows [M, D] of tokens int64 [M]."""
    if rows.dim() != 2 or rows.dtype not in ROWS or rows.shape[1] * rows.itemsize % WORD:
        raise ValueError(
            f"rows are {described(rows)}; they take float32 or bfloat16 [M, D] of whole words of {WORD} bytes"
        )
    tokens = checked("tokens", tokens, (torch.int64,), (len(rows),), rows)
    rows = checked("rows", rows, ROWS, tuple(rows.shape), rows)
    return table_gradient(rows, tokens, *by_entry(tokens, entries))
