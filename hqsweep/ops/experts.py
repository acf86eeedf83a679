"""Operators around the experts of a mixture: routing of tokens, their dispatch and combination, exchange between ranks.

Each of M tokens of D elements chooses k of E experts. Choice c = token * k + rank has its row at places[c] among the M
* k rows, which are sorted by expert. The caller guarantees that places is a permutation: checking would wait for the
device. Arithmetic is float32, with a fixed order of sums (formulas: csrc/experts.h, csrc/cuda/route.cu). On CUDA these
are hqsweep::route, route_backward, place_choices, dispatch_rows, sum_rows, combine_rows and combine_rows_backward. nn's
router has the reference by torch's operators.

If experts are padded to whole blocks of rows (PaddedSplits), `starts` is int64 [2, E + 1]: where experts begin without
padding and with it. places then count padding rows. Padding rows are zero, and rows after the last expert are
undefined.

W ranks can share the experts while only the device knows how many rows go where (copy_rows, expert_places). All ranks
have equally many rows, sorted by expert, and hold e = E / W experts, in rank order. At an expert, rows are sorted by
rank, then by their order at that rank. On CUDA the kernels of csrc/expert_rows.h do this work, elsewhere torch's
operators, which are the reference. Nothing waits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.ops.library import described, empty, extension, has_kernels, on_its_device, operator, where
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


WORD = 16
"""Bytes that the kernels load at once; copied rows are whole words."""


def copy_rows(rows: Tensor, index: Tensor, out: Tensor) -> None:
    """Copy rows[index[i]] to out[i]. A negative index leaves out[i] unchanged.

    rows [R, D], index int64 [N], out [N, D], all contiguous; rows and out have one dtype.
    """
    if 0 in (*rows.shape, *out.shape):
        return
    if rows.is_cuda and has_kernels("cuda") and _whole_words(rows) and _whole_words(out):
        _copy_by_kernel(rows, index, out)
    else:
        out.copy_(torch.where((index < 0)[:, None], out, rows.index_select(0, index.clamp(min=0))))


def _whole_words(x: Tensor) -> bool:
    return x.shape[1] * x.itemsize % WORD == 0 and x.data_ptr() % WORD == 0 and not x.is_neg()


@on_its_device
def _copy_by_kernel(rows: Tensor, index: Tensor, out: Tensor) -> None:
    addresses = (index.data_ptr(), rows.data_ptr(), out.data_ptr())
    extension().copy_rows_cuda(*addresses, len(out), out.shape[1] * out.itemsize, *where(rows))


class ExpertPlaces(NamedTuple):
    """Index tables for the exchange, int64; -1 for none."""

    own: Tensor
    """[places]: the row of this rank that goes to each place of its experts. A place has at most one of own, sent,
    filling."""
    sent: Tensor
    """[places]: the received row that goes to each place, as an index into [W - 1, rows]."""
    filling: Tensor
    """[places]: the expert that each padding place belongs to."""
    there: Tensor
    """[W, rows]: for each row of each rank, its place at this rank's experts."""
    leaving: Tensor
    """[W, rows]: this rank's rows that go to each rank's experts, as their own index."""
    returning: Tensor
    """[rows]: for each row of this rank that went to another rank, its index in the returned [W - 1, rows]."""


def expert_places(counts: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int) -> ExpertPlaces:
    """Return the index tables of one exchange.

    counts int64 [W, E]: rows of each rank for each expert. here int64 [W, e]: rows for this rank's experts, summed over
    the ranks up to each. offsets int64 [e + 1]: where these experts begin, possibly padded. places: the number of
    places.
    """
    ends = counts.cumsum(dim=1)
    if counts.is_cuda and has_kernels("cuda"):
        return _places_by_kernel(ends, here.contiguous(), offsets.contiguous(), rank, rows, places)
    return _places_by_torch(counts, ends, here, offsets, rank, rows, places)


@on_its_device
def _places_by_kernel(ends: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int) -> ExpertPlaces:
    ranks, experts = ends.shape
    shapes = ((places,), (places,), (places,), (ranks, rows), (ranks, rows), (rows,))
    results = ExpertPlaces(*(ends.new_empty(shape) for shape in shapes))
    tables = (ends.data_ptr(), here.data_ptr(), offsets.data_ptr())
    addresses = [result.data_ptr() for result in results]
    extension().expert_places_cuda(*tables, ranks, experts, rank, rows, places, addresses, *where(ends))
    return results


def _places_by_torch(
    counts: Tensor, ends: Tensor, here: Tensor, offsets: Tensor, rank: int, rows: int, places: int
) -> ExpertPlaces:
    ranks, held = here.shape
    first, order = rank * held, torch.arange(rows, device=counts.device)
    starts, before = ends - counts, here - counts[:, first : first + held]

    def among_others(other: Tensor) -> Tensor:
        return other - (other > rank).long()

    place = torch.arange(places, device=counts.device)
    expert = torch.bucketize(place, offsets[1:], right=True)
    some, expert = expert < held, expert.clamp(max=held - 1)
    number = place - offsets[expert]
    source = (number[:, None] >= here.t()[expert]).sum(dim=1)
    real, source = some & (source < ranks), source.clamp(max=ranks - 1)
    row = starts[source, first + expert] + number - before[source, expert]
    is_own = real & (source == rank)
    own = row.where(is_own, -1)
    sent = (among_others(source) * rows + row).where(real & ~is_own, -1)
    filling = expert.where(some & ~real, -1)

    expert_of = torch.searchsorted(ends, order.expand(ranks, -1).contiguous(), right=True)
    mine = (expert_of >= first) & (expert_of < first + held)
    expert = (expert_of - first).clamp(0, held - 1)
    begin = starts[:, first : first + held].gather(1, expert)
    there = (offsets[expert] + before.gather(1, expert) + order - begin).where(mine, -1)
    to = expert_of[rank] // held
    leaving = torch.stack([order.where(to == other, -1) for other in range(ranks)])
    returning = (among_others(to) * rows + order).where((to != rank) & (to < ranks), -1)
    return ExpertPlaces(own, sent, filling, there, leaving, returning)


MOST_EXPERTS = 256
MOST_CHOICES = 32
"""The largest number of experts that a token can choose."""
_CHOICES_OF_BLOCK, _TOKENS_OF_BLOCK = 1024, 64


@operator(
    "place_choices(Tensor chosen, SymInt experts) -> Tensor[]",
    fake=lambda chosen, experts: [*(chosen.new_empty(chosen.numel()) for _ in range(2)), chosen.new_empty(experts)],
    devices=("CUDA",),
)
def place_choices(chosen: Tensor, experts: int) -> list[Tensor]:
    """Return [order, places, tokens] for chosen int64 [M, k] with entries 0 to E - 1.

    order [M * k]: choices sorted by expert, stably. places [M * k]: its inverse. tokens int64 [E]: choices per expert.
    ValueError for other dtypes, and for more than 256 experts.
    """
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"experts are {experts}; the kernels place 1 to {MOST_EXPERTS}")
    chosen = checked("chosen", chosen, (torch.int64,), tuple(chosen.shape), chosen)
    count = chosen.numel()
    order, places = (empty(chosen, (count,), (1,), torch.int64) for _ in range(2))
    tokens = empty(chosen, (experts,), (1,), torch.int64)
    counts = empty(chosen, (experts * -(-count // _CHOICES_OF_BLOCK),), (1,), torch.int32)
    addresses = (counts.data_ptr(), order.data_ptr(), places.data_ptr(), tokens.data_ptr())
    extension().place_choices_cuda(chosen.data_ptr(), count, experts, *addresses, *where(chosen))
    return [order, places, tokens]


def routes(logits: Tensor, choices: int) -> bool:
    """Return whether the kernels take logits [M, E]."""
    tokens, experts = logits.shape
    return logits.dtype is torch.float32 and tokens > 0 and experts <= MOST_EXPERTS and choices <= MOST_CHOICES


def _routed(logits, choices):
    tokens, experts = logits.shape
    chosen = logits.new_empty((tokens, choices), dtype=torch.int64)
    placed = (chosen.new_empty(tokens * choices) for _ in range(2))
    weights = logits.new_empty((tokens, choices))
    return [torch.empty_like(logits), chosen, weights, logits.new_empty(()), *placed, chosen.new_empty(experts)]


@operator("route(Tensor logits, SymInt choices) -> Tensor[]", fake=_routed, devices=("CUDA",))
def route(logits: Tensor, choices: int) -> list[Tensor]:
    """Return [probabilities, chosen, weights, balance, order, places, tokens] for logits float32 [M, E].

    probabilities [M, E]: softmax of the logits. chosen int64 [M, k]: the `choices` largest entries of each row; NaN
    comes first, and among equals the lower index. weights float32 [M, k]: these entries divided by their sum.
    balance float32 []: E * sum over e of tokens_e / (M k) * mean of p_e. The rest as in place_choices().
    """
    logits = checked("logits", logits, (torch.float32,), tuple(logits.shape), logits)
    if logits.dim() != 2 or not routes(logits, choices) or not 1 <= choices <= logits.shape[1]:
        takes = f"they take [M, E], M above 0, E and k up to {MOST_EXPERTS} and {MOST_CHOICES}, k up to E"
        raise ValueError(f"logits are {described(logits)} for {choices} choices; {takes}")
    tokens, experts = logits.shape
    probabilities, balance = torch.empty_like(logits), empty(logits, (), (), torch.float32)
    chosen = empty(logits, (tokens, choices), (choices, 1), torch.int64)
    weights = empty(logits, (tokens, choices), (choices, 1), torch.float32)
    sums = rows_of(logits, -(-tokens // _TOKENS_OF_BLOCK), experts, torch.float32)
    arrays = [x.data_ptr() for x in (logits, probabilities, chosen, weights, sums)]
    extension().route_cuda(tokens, experts, choices, *arrays, *where(logits))
    order, places, counts = place_choices(chosen, experts)
    ends = (counts.data_ptr(), balance.data_ptr())
    extension().balance_cuda(tokens, experts, choices, *arrays, *ends, *where(logits))
    return [probabilities, chosen, weights, balance, order, places, counts]


@operator(
    "route_backward(Tensor probabilities, Tensor chosen, Tensor weights, Tensor counts, Tensor? dweights, "
    "Tensor? dbalance) -> Tensor",
    fake=lambda probabilities, *_: torch.empty_like(probabilities),
    devices=("CUDA",),
)
def route_backward(probabilities, chosen, weights, counts, dweights, dbalance):
    """Return the gradient of the logits, float32 [M, E], from route()'s results and the gradients of weights and
    balance."""
    shape, experts = tuple(chosen.shape), probabilities.shape[-1]
    probabilities = checked("probabilities", probabilities, (torch.float32,), (shape[0], experts), probabilities)
    weights = checked("weights", weights, (torch.float32,), shape, probabilities)
    chosen = checked("chosen", chosen, (torch.int64,), shape, probabilities)
    counts = checked("counts", counts, (torch.int64,), (experts,), probabilities)
    gradients = [
        None if x is None else checked(name, x, (torch.float32,), expected, probabilities)
        for name, x, expected in (("dweights", dweights, shape), ("dbalance", dbalance, ()))
    ]
    dlogits = torch.empty_like(probabilities)
    arrays = (0, probabilities.data_ptr(), chosen.data_ptr(), weights.data_ptr(), 0)
    addresses = (0 if x is None else x.data_ptr() for x in gradients)
    call = (shape[0], experts, shape[1], *arrays, counts.data_ptr(), *addresses, dlogits.data_ptr())
    extension().route_back_cuda(*call, *where(probabilities))
    return dlogits
