"""Context parallelism: the tokens of each sequence are split over ranks, and attention sees all of them."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hqsweep.errors import UserError
from hqsweep.nn.transformer import MultiheadAttention
from hqsweep.parallel.mesh import axis_of
from hqsweep.parallel.shared.attention import share_attention

AXIS = "cp"


def context_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Have every MultiheadAttention of the model take this rank's part of each sequence, x [B, T / n, D]. Returns the
    model.

    Rank r of the n ranks along the axis "cp" of the mesh, or its only axis, has the tokens [r * T / n, (r + 1) * T /
    n). Queries, keys and values are gathered in the linears' dtype, and attention runs in high precision. Each rank
    attends from its own tokens; under a causal mask it attends to the tokens before them. Gradients of queries, keys
    and values are summed over ranks.

    Linears quantize the tokens of their rank, like data-parallel ranks. Gradients of parameters come from these tokens;
    DistributedDataParallel or fully_shard adds them up. Sums have another order than in one process.

    UserError for a mesh of several axes without "cp", a model without attention, attention with quantize_boundaries,
    and, at the call, attention in low precision.
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
