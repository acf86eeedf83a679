"""Context parallelism: the tokens of every sequence spread over ranks, attention in high precision over all of them."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hqsweep.errors import UserError
from hqsweep.nn.attention.multihead_attention import MultiheadAttention
from hqsweep.parallel.axis_peers import axis_of
from hqsweep.parallel.shared.attention import share_attention

AXIS = "cp"


def context_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Have every MultiheadAttention of the model take x [B, T / n, D]: the tokens [r * T / n, (r + 1) * T / n) of each
    sequence on rank r of the n ranks along an axis of the mesh, "cp" or the only one. Returns the model.

    Queries, keys and values are gathered in the linears' dtype. Each rank attends from its own tokens, under a causal
    mask to the tokens before them, and the gradients of all three are summed over ranks. Linears around it quantize the
    tokens of their rank, as those of data-parallel ranks do; gradients of parameters come from these tokens, for
    DistributedDataParallel or fully_shard to add up. Sums have another order than in one process.

    UserError for a mesh of several axes without "cp", a model without attention, tensors that are rounded at its
    boundaries, and, at the call, for attention in low precision.
    """
    group = axis_of(mesh, AXIS, "context_parallel").get_group()
    attentions = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    if not attentions:
        raise UserError(f"context_parallel: {type(model).__name__} has no MultiheadAttention")
    rounded = [module.dpa.name for module in attentions if module.quantize_boundaries]
    if rounded:
        raise UserError(f"{rounded[0]}: quantize_boundaries rounds gradients that are then summed over ranks; drop it")
    for module in attentions:
        share_attention(module.dpa, tokens=group)
    return model
