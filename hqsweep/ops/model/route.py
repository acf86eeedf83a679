"""Routing of tokens to the experts of a mixture, on CUDA: hqsweep::route, route_backward and place_choices.

Sums have a fixed order (csrc/cuda/route.cu). It differs from torch's operators in nn's router, the reference.
"""

import torch
from torch import Tensor

from hqsweep.ops.addresses import described, empty
from hqsweep.ops.library import extension, operator, where
from hqsweep.ops.model.experts import checked, rows_of

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
    comes
    first, and among equals the lower index. weights float32 [M, k]: these entries divided by their sum.
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
