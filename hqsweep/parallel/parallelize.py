"""A model over the ranks of a mesh: first its matrices are shared out, then its layers, experts and parameters."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from hqsweep.nn.transformer import LayerNormMoE
from hqsweep.parallel.data import shard
from hqsweep.parallel.mesh import Ranks


def parallelize(
    model: nn.Module,
    ranks: Ranks,
    sequences: int,
    methods: Iterable[str] = (),
    autocast: torch.dtype | None = None,
) -> None:
    """Share out a model, in place, along every axis of the mesh with several ranks: tp, then ep, then dp_shard.

    sequences: divides the batch of every call. methods, autocast: as in parallel.data.shard.
    """
    _share_matrices(model, ranks, sequences)
    apart = _share_experts(model, ranks)
    if ranks.data_size > 1:
        shard(model, ranks, methods, apart, autocast)


def parallelize_layers(model: nn.Module, ranks: Ranks, sequences: int, microbatches: int, load_balance: float) -> Any:
    """Share out a GPT, in place, over a mesh with several ranks along pp, and return the Pipeline that trains it.

    Matrices are shared along tp, layers along pp, then experts and parameters of each stage along ep and dp_shard.
    sequences: as parallelize() takes it.
    """
    from hqsweep.parallel.pipeline import Pipeline

    dims = ranks.dims
    _share_matrices(model, ranks, sequences)
    options = {"stages_per_rank": dims.stages_per_rank, "copies": ranks.data_size, "load_balance": load_balance}
    pipeline = Pipeline(model, ranks.mesh, microbatches, **options)
    apart = _share_experts(model, ranks)
    for part in pipeline.parts.values() if ranks.data_size > 1 else ():
        shard(part, ranks, apart=apart)
    return pipeline


def _share_matrices(model: nn.Module, ranks: Ranks, sequences: int) -> None:
    """Give each rank its part of the matrices, if tp has several ranks. Between matrices a rank has whole sequences
    where ranks divide `sequences`, else a part of each sequence."""
    if ranks.dims.tp > 1:
        from hqsweep.parallel.tensor import TOKENS, tensor_parallel

        tensor_parallel(model, ranks.mesh, axis=TOKENS if sequences % ranks.dims.tp else 0)


def _share_experts(model: nn.Module, ranks: Ranks) -> set[nn.Parameter]:
    """Give each rank its part of the experts, if ep has several ranks. Returns the parameters that no other rank has,
    which fully_shard must leave alone.

    Ranks that hold the same experts share out their parameters. Gradients are sums over all ranks. A stage of a
    pipeline may have no experts.
    """
    if ranks.dims.ep == 1:
        return set()
    mesh = ranks.expert_mesh["dp_replicate", "efsdp", "ep", "tp"]  # a collective of the ranks of all stages
    mixtures = [module for module in model.modules() if isinstance(module, LayerNormMoE)]
    if not mixtures:
        return set()
    from torch.distributed.fsdp import fully_shard

    from hqsweep.parallel.expert import expert_parallel
    from hqsweep.parallel.tensor import shard_placement

    expert_parallel(model, mesh, average=False, expert_room=ranks.dims.expert_room)
    experts = [grouped for mixture in mixtures for grouped in (mixture.fc1, mixture.fc2)]
    if ranks.data_size == ranks.dims.ep:
        return {parameter for grouped in experts for parameter in grouped.parameters()}
    placement = partial(shard_placement, ranks=ranks.dims.dp_shard // ranks.dims.ep)
    for grouped in experts:
        options = {"mesh": ranks.expert_fsdp_mesh, "shard_placement_fn": placement}
        fully_shard(grouped, reshard_after_forward=True, **options)
    return set()
