"""Data parallelism: fully_shard over the blocks of a model, with gradients that are sums over ranks; and the error
statistics of a step over all ranks.

torch's modules of FSDP and DTensor import sympy and take half a second. They are imported inside functions, so that a
run in one process does without them.

For the statistics of a sampled step rank 0 joins the samples of all probes, in order of ranks. Parts of a matrix are
joined to the whole first. Then tokens of data-parallel ranks follow each other, like tokens of microbatches, and the
layers and experts of other ranks are added. One gather serves all rows of a step.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.nn.core.module import PARTS
from hqsweep.nn.core.probe import Key, Probe, Sample, is_of_step, rows_of, what_if_rows_of
from hqsweep.nn.core.residual import KNOWN_HOOKS, RESIDUAL
from hqsweep.nn.linears import LinearBase
from hqsweep.parallel.mesh import Ranks
from hqsweep.parallel.shards.fsdp_state import groups_of, hook_ids
from hqsweep.torch_private import fsdp_owners, fsdp_whole


def residual_under_fsdp(layer: nn.Module) -> None:
    """Run the hooks of fully_shard around a layer's residual(x, branch), too. The layer is a unit of fully_shard.

    So the sum of a branch is deferred to the next norm under fully_shard as well.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    if hasattr(layer, RESIDUAL):
        register_fsdp_forward_method(layer, RESIDUAL)
        layer.__dict__[KNOWN_HOOKS] = frozenset(hook_ids(layer))


def shard(
    model: nn.Module,
    ranks: Ranks,
    methods: Iterable[str] = (),
    apart: Collection[nn.Parameter] = (),
    autocast: torch.dtype | None = None,
) -> None:
    """Share out the parameters of a model over ranks.fsdp_mesh. Each block is a unit of fully_shard, as is the head of
    a GPT, and the rest is one more.

    Gradients are summed over ranks, so a rank's loss must be its share of the mean. Weights of linears are gathered in
    the linear's dtype, all other parameters in their own.

    methods: names of the model's methods that compute as its forward does. apart: parameters that only this rank has,
    and keeps whole. autocast: as gather_in_linear_dtype() takes it.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from hqsweep.parallel.fsdp_exchanges import exchange_by_copies
    from hqsweep.parallel.tensor import shard_placement

    # Layers and heads of hqsweep return views of their products, and nothing here changes these in place.
    modules = r"\(FSDP(TransformerLayer|MoELayer|Head)\)"
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module {modules} returned a view")
    placement = partial(shard_placement, ranks=ranks.dims.dp_shard)
    options = {"mesh": ranks.fsdp_mesh, "ignored_params": set(apart), "shard_placement_fn": placement}
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=True, **options)
        residual_under_fsdp(block)
    if (head := _own_head(model)) is not None:  # its gradient is ready first, and travels beside backward
        fully_shard(head, reshard_after_forward=False, **options)
        register_fsdp_forward_method(head, "loss")
    fully_shard(model, **options)
    gather_in_linear_dtype(model, autocast)
    for name in methods:
        register_fsdp_forward_method(model, name)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # so that gloo, too, reduces without a factor
        if ranks.device.type == "cuda":
            exchange_by_copies(unit)


def _own_head(model: nn.Module) -> nn.Module | None:
    """The output projection of a GPT, or of its last stage, if its weight is not the embedding's."""
    head, embedding = getattr(model, "head", None), getattr(model, "embedding", None)
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    return head if hasattr(head, "loss") and not tied else None


def gather_in_linear_dtype(model: nn.Module, autocast: torch.dtype | None = None) -> None:
    """Have fully_shard gather the weights of linears in the dtype to which the linear rounds them.

    Call it when all units of the model are made, before the first forward. autocast: the dtype of torch.autocast in
    every forward, to which linears of convert() round; None: their weights are gathered as they are.

    Values, gradients and random bits do not change: a float32 weight of a bfloat16 linear keeps float32 gradients, and
    is quantized from its values in bfloat16. Between forward and backward every reader of the weight sees the rounded
    values. Gathered memory is free as soon as the operands are made.

    These weights are gathered as before: weights that other modules share, weights in a dtype that is no wider, held
    weights, and weights whose linear has another dtype than the first linear of the unit.
    """
    from hqsweep.parallel.fsdp_exchanges import gather_in

    for module in model.modules():
        for group in groups_of(module):
            dtypes = {parameter: _linear_dtype(parameter, autocast) for parameter in group.fsdp_params}
            first = next((dtype for dtype in dtypes.values() if dtype is not None), None)
            for parameter, dtype in dtypes.items():
                if dtype is not None and dtype == first and fsdp_whole(parameter) is None:
                    gather_in(group, parameter, dtype)


def _linear_dtype(parameter: Any, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which fully_shard gathers a parameter that only linears use; None for other parameters."""
    [dtype, *others] = {_rounds_to(owner, name, autocast) for owner, name in fsdp_owners(parameter)}
    own, local_tensor = parameter.sharded_param.dtype, parameter.sharded_param.to_local()
    if others or dtype is None or not own.is_floating_point or hasattr(local_tensor, "fsdp_pre_all_gather"):
        return None
    return dtype if dtype.itemsize < own.itemsize else own


def _rounds_to(owner: nn.Module, name: str, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to which a module rounds the parameter of that name, if it is the weight of a linear; else
    None."""
    if isinstance(owner, LinearBase):
        return owner.dtype if name.startswith("weight") else None
    kinds = [part.module_type for part in owner.__dict__.get(PARTS, ())]
    return autocast if name == "weight" and kinds == ["linear"] else None


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the outermost ModuleLists: the layers of a transformer."""
    modules: list[nn.Module] = []
    for child in model.children():
        modules += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return modules


def is_unit(module: nn.Module) -> bool:
    """Whether fully_shard was called on the module itself, which makes it a torch.distributed.fsdp.FSDPModule."""
    return hasattr(module, "set_requires_gradient_sync")


def units(model: nn.Module) -> list[Any]:
    """The modules on which fully_shard was called."""
    return [module for module in model.modules() if is_unit(module)]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of every unit of fully_shard. The outermost unit would keep them until a
    backward."""
    for unit in units(model):
        unit.reshard()


@contextmanager
def synchronized(model: nn.Module, last: bool) -> Iterator[None]:
    """The context of one microbatch: gradients are summed over ranks only in the last microbatch of a step."""
    if is_unit(model):
        model.set_requires_gradient_sync(last)
    yield


Samples = Mapping[Key, Sample]


def rows_of_all(probe: Probe, ranks: Ranks) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The rows of the tables stats and what_if, of the probes of all ranks, on rank 0; [] on others. A collective, also
    for ranks without a sample."""
    every = ranks.gather_to_first(probe.samples)
    if every is None:
        return [], []
    total = joined(every, ranks.dims.tp)
    here = {key: sample.to(ranks.device) for key, sample in total.items()}
    return rows_of(probe.step, here), what_if_rows_of(probe.step, here)


def captured_of_all(probe: Probe, ranks: Ranks) -> dict[str, Tensor]:
    """The whole operands that the probes of all ranks have captured, on rank 0; {} on others. A collective."""
    every, whole = ranks.gather_to_first(probe.operands) or [], {}
    for first in range(0, len(every), ranks.dims.tp):
        sharing = every[first : first + ranks.dims.tp]
        for name, (matrix, part) in sharing[0].items():
            if name not in whole:
                whole[name] = matrix if part is None else _put_together([own[name].matrix for own in sharing], *part)
    return whole


def _put_together(parts: Sequence[Tensor], axis: int, runs: int) -> Tensor:
    """The matrix that the ranks' parts form. runs: the number of pieces of each part, which alternate with other
    ranks'."""
    pieces = zip(*(part.chunk(runs, axis) for part in parts), strict=True)
    return torch.cat([piece for run in pieces for piece in run], axis)


def joined(samples: Sequence[Samples], tp: int) -> Samples:
    """One sample for each row, from the samples of all ranks. tp: how many neighbours share matrices and have the same
    tokens.

    Samples of weights are equal on all ranks that have one, and count once.
    """
    total: dict[Key, Sample] = {}
    for first in range(0, len(samples), tp):
        for key, sample in _joined_parts(samples[first : first + tp]):
            if key not in total:
                total[key] = sample
            elif not is_of_step(key.name):
                total[key] = total[key].joined(sample, key.direction)
    return total


def _joined_parts(samples: Sequence[Samples]) -> Iterable[tuple[Key, Sample]]:
    """The samples of ranks that share matrices. Parts are joined; samples that each rank has whole count once."""
    for key in dict.fromkeys(key for own in samples for key in own):
        whole, *others = (own[key] for own in samples if key in own)
        for part in others:
            if whole.cut is not None:
                whole = whole.joined(part, key.direction, whole.cut)
        yield key, whole
