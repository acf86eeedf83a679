"""Data parallel ranks: fully_shard over the blocks of a model, and gradients that are sums over ranks.

torch's modules of FSDP and DTensor import sympy and take half a second, so only code that needs ranks imports them: a
run in one process does without.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hqsweep.nn.core.module import PARTS
from hqsweep.nn.core.residual import KNOWN_HOOKS, RESIDUAL
from hqsweep.nn.linear.linear import LinearBase
from hqsweep.parallel.fsdp.fsdp_state import groups_of, hook_ids
from hqsweep.parallel.mesh import Ranks
from hqsweep.parallel.wire import collectives
from hqsweep.parallel.wire.local import spread_out, whole_tensor


def residual_under_fsdp(layer: nn.Module) -> None:
    """Have the hooks of fully_shard, whose unit a layer is, run around its residual(x, branch), too, so that the sum of
    a branch is left to the next norm there as well."""
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
    """Share out the parameters of a model over ranks.fsdp_mesh, a unit for each of its blocks, one for the head of a
    GPT, and one for the rest.

    Gradients are summed over ranks, so that a rank's part of the loss is its share of the mean. Weights of linears are
    gathered in the linear's dtype, all others in their own. methods: the names of the model's methods that compute as
    its forward does. apart: parameters that this rank alone has, and keeps. autocast: see gather_in_linear_dtype().
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from hqsweep.parallel.fsdp.unit_comms import exchange_by_copies
    from hqsweep.parallel.tensor import shard_placement

    # Layers and heads of hqsweep give views of their products, which nothing here changes in place.
    modules = r"\(FSDP(TransformerLayer|MoELayer|Head)\)"
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module {modules} returned a view")
    placement = partial(shard_placement, ranks=ranks.dims.dp_shard)
    options = {"mesh": ranks.fsdp_mesh, "ignored_params": set(apart), "shard_placement_fn": placement}
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=True, **options)
        residual_under_fsdp(block)
    if (head := _own_head(model)) is not None:  # its gradient, the first, travels while the others are computed
        fully_shard(head, reshard_after_forward=False, **options)
        register_fsdp_forward_method(head, "loss")
    fully_shard(model, **options)
    gather_in_linear_dtype(model, autocast)
    for name in methods:
        register_fsdp_forward_method(model, name)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # by which gloo, too, reduces without a factor
        if ranks.device.type == "cuda":
            exchange_by_copies(unit)


def _own_head(model: nn.Module) -> nn.Module | None:
    """The output projection of a GPT, or of its last stage, if it has a weight of its own."""
    head, embedding = getattr(model, "head", None), getattr(model, "embedding", None)
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    return head if hasattr(head, "loss") and not tied else None


def gather_in_linear_dtype(model: nn.Module, autocast: torch.dtype | None = None) -> None:
    """Have plain weights of linears that fully_shard has cut travel in the dtype that their linear rounds them to. Call
    it when every unit of the model is made, and before its first forward. autocast: the dtype of torch.autocast in
    every forward, to which linears of convert() round; None: their weights travel as they are.

    Values, gradients and random bits do not change: a float32 weight of a bfloat16 linear has float32 gradients, and is
    quantized from its values in bfloat16. Between forward and backward every reader of the weight sees those values.
    Memory that was gathered is free as soon as its operands are made. Other weights travel as they did: those that
    other modules share, those whose dtype is no wider, those held quantized, and those of linears with another dtype
    than the first one of their unit.
    """
    from hqsweep.parallel.fsdp.narrow_gather import gather_in

    for module in model.modules():
        for group in groups_of(module):
            dtypes = {parameter: _linear_dtype(parameter, autocast) for parameter in group.fsdp_params}
            first = next((dtype for dtype in dtypes.values() if dtype is not None), None)
            for parameter, dtype in dtypes.items():
                if dtype is not None and dtype == first and not hasattr(parameter, "_unsharded_param"):
                    gather_in(group, parameter, dtype)


def _linear_dtype(parameter: Any, autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which an FSDPParam that is a weight of linears, and of nothing else, is gathered."""
    info = parameter._module_info
    owners = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
    [dtype, *others] = {_rounds_to(owner, name, autocast) for owner, name in owners}
    own, local_tensor = parameter.sharded_param.dtype, parameter.sharded_param.to_local()
    if others or dtype is None or not own.is_floating_point or hasattr(local_tensor, "fsdp_pre_all_gather"):
        return None
    return dtype if dtype.itemsize < own.itemsize else own


def _rounds_to(owner: nn.Module, name: str, autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype to which a module rounds its parameter of that name, if it is the weight of a linear."""
    if isinstance(owner, LinearBase):
        return owner.dtype if name.startswith("weight") else None
    kinds = [part.module_type for part in owner.__dict__.get(PARTS, ())]
    return autocast if name == "weight" and kinds == ["linear"] else None


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the outermost lists of modules: the layers of a transformer."""
    modules: list[nn.Module] = []
    for child in model.children():
        modules += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return modules


def is_unit(module: nn.Module) -> bool:
    """Whether fully_shard was called on the module itself, whose class is then a torch.distributed.fsdp.FSDPModule."""
    return hasattr(module, "set_requires_gradient_sync")


def units(model: nn.Module) -> list[Any]:
    """The modules that fully_shard was called on."""
    return [module for module in model.modules() if is_unit(module)]


def reshard(model: nn.Module) -> None:
    """Have every unit of fully_shard go back to its shards. The outermost one would keep what its forward has gathered
    until a backward, and its module would have those tensors in the place of the parameters meanwhile."""
    for unit in units(model):
        unit.reshard()


@contextmanager
def synchronized(model: nn.Module, last: bool) -> Iterator[None]:
    """Enter this around a microbatch: gradients are summed over ranks only in the last one of a step."""
    if is_unit(model):
        model.set_requires_gradient_sync(last)
    yield


def in_order(value: Tensor, ranks: Ranks) -> Tensor:
    """value [...] of every rank with other sequences -> [data_size, ...] in order of data_rank. A collective."""
    every = value.new_empty((ranks.data_size, *value.shape))
    collectives.all_gather(every.view(-1), value.reshape(-1).contiguous(), group=ranks.data_group)
    return every


def whole(tree: object) -> object:
    """A nest of dicts and lists with every DTensor as the whole tensor. A collective."""
    return tree_map_only(Tensor, whole_tensor, tree)


def shared_out(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The "model" and "optimizer" of a state of whole tensors, cut as the parameters are shared out: this rank's
    parts."""
    own = model.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        index: {name: _part(v, params[index]) if _is_of(v, params[index]) else v for name, v in entries.items()}
        for index, entries in state["optimizer"]["state"].items()
    }
    return {
        "model": {name: _part(value, own.get(name)) for name, value in state["model"].items()},
        "optimizer": state["optimizer"] | {"state": moments},
    }


def _is_of(value: object, p: Tensor) -> bool:
    """Whether something in an optimizer's state has an entry for each element of a parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _part(value: Tensor, like: Tensor | None) -> Tensor:
    """This rank's part of a whole tensor, cut as `like` is; the tensor itself where `like` is whole."""
    return value if like is None else spread_out(value.to(like.device), like)
