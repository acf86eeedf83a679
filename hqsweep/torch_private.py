"""The names of torch that are not public and that hqsweep uses: the only file to read when a new torch moves one.

Checked with torch 2.11, 2.12 and 2.13; FSDP's also with 2.15. A name that is gone fails when this module is imported,
unless its note says otherwise. A name stands here as torch has it, so that a call costs no more. Modules that are slow
to import (torch._dynamo, DTensor, FSDP) are imported in functions.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # every nn.BatchNorm*d
from torch.nn.modules.batchnorm import _NormBase as NormBase  # those, and every nn.InstanceNorm*d
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map, tree_map_only

__all__ = ["BatchNorm", "ConvNd", "DropoutNd", "NormBase", "tree_map", "tree_map_only"]
_aten, _C = torch.ops.aten, torch._C

# Lists of tensors, in one launch each. torch's docs list some as a beta; none has a public name.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_maximum_ = torch._foreach_maximum_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_

# Products.
grouped_mm = torch._grouped_mm
scaled_grouped_mm = torch._scaled_grouped_mm
scaled_mm = torch._scaled_mm

# Operators of torch.ops.aten.
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
flash_attention_on_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_on_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn_attention = _aten._scaled_dot_product_cudnn_attention
pin_memory = _aten._pin_memory
to_copy = _aten._to_copy
unsafe_view = _aten._unsafe_view

# Subclasses of tensors, and what autograd and the dispatcher are at.
disabled_torch_function = _C._disabled_torch_function_impl
make_wrapper_subclass = Tensor._make_wrapper_subclass
refuse_data_ptr = _C._set_throw_on_mutable_data_ptr
"""(tensor) -> None: from then on torch raises RuntimeError where it would read or write the tensor's memory."""
unsafe_preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
current_graph_task_id = _C._current_graph_task_id
"""() -> the id of the backward that runs in this thread; -1 outside of one."""
top_saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
"""(True) -> the innermost hooks of saved tensors, or None."""
dispatch_modes = _C._len_torch_dispatch_stack
"""() -> the number of dispatch modes that are on."""
transforms = _C._functorch.peek_interpreter_stack
"""() -> the innermost transform of torch.func, or None."""
is_legacy_batched = _C._functorch.is_legacy_batchedtensor
"""(tensor) -> whether is_grads_batched=True made it."""
queue_callback = Variable._execution_engine.queue_callback
"""(function) -> None: autograd calls the function at the end of this backward."""
DispatchKey, DispatchKeySet = _C.DispatchKey, _C.DispatchKeySet
current_raw_stream = getattr(_C, "_cuda_getCurrentRawStream", None)
"""(device) -> the address of the current stream, at a tenth of torch.cuda.current_stream()'s time. None without
CUDA."""
end_allocate_to_pool = getattr(_C, "_cuda_endAllocateToPool", None)
"""(device, pool) -> None: allocations go elsewhere again. None without CUDA."""

# Names that frames, wrappers and forward functions of torch have. Where one has changed, nothing is found.
CHECKPOINT_FRAME = "_CheckpointFrame"
"""The class that torch.utils.checkpoint keeps the inputs of a part in."""
BROADCASTS_PARAMETERS = "_sync_params_and_buffers"
"""The function by which DistributedDataParallel gives all ranks the parameters of one."""
COMPILED_FROM = "_orig_mod"
"""The attribute in which torch.compile's module holds the plain one."""

active_ddp_module = DistributedDataParallel._get_active_ddp_module
"""() -> the DistributedDataParallel whose forward runs, or None."""
has_global_hooks = _module._has_any_global_hook
"""() -> whether any hook of all modules is set."""

try:  # the allocators of Inductor's code, on the current device: a third of torch.empty's time
    from torch._C._dynamo.guards import _empty_strided_cpu as empty_strided_cpu
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda
except ImportError:

    def _empty_strided(device, size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    empty_strided_cpu, empty_strided_cuda = partial(_empty_strided, "cpu"), partial(_empty_strided, "cuda")


def schema_of(operator: Any) -> Any:
    """The schema of an operator: its arguments and whether it writes to one (is_mutable)."""
    return operator._schema


def storage_id(tensor: Tensor) -> int:
    """The address of the object that owns a tensor's memory, which stays when the memory is freed and made anew."""
    return tensor.untyped_storage()._cdata


def hook_tables(module: nn.Module) -> tuple[dict, ...]:
    """The hooks around a call of the module, id -> hook, in four dictionaries."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def is_compiled(module: nn.Module) -> bool:
    """Whether module.compile() was called."""
    return module._compiled_call_impl is not None


def drop_compiled(module: nn.Module) -> None:
    """Undo module.compile(), so that the module's forward runs as it is."""
    module._compiled_call_impl = None


def inductor_options() -> dict[str, Any]:
    """The options of torch.compile with which equal sums have equal bits in every process on one kind of device."""
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else {}


def raise_recompile_limit(graphs: int) -> None:
    """Have Dynamo keep at least so many graphs of one function."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, graphs)


def dynamo_output() -> Any:
    """The OutputGraph of the trace that torch.compile makes now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


# DTensor and meshes.
def local_tensor(x: Any) -> Tensor:
    """This rank's part of a DTensor, without a node of autograd, which to_local() adds; any other tensor as it is."""
    return getattr(x, "_local_tensor", x)


def dtensor_like(p: Any, part: Tensor) -> Any:
    """The DTensor of `part` with p's mesh, placements, shape and strides; `part` may lie on any device."""
    meta = p._spec.tensor_meta._replace(dtype=part.dtype)
    return type(p)(part, type(p._spec)(p.device_mesh, p.placements, tensor_meta=meta), requires_grad=False)


def local_box(x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the offsets of a DTensor's part on this rank."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(shape), tuple(offsets)


def strided_shard() -> type:
    """The placement of a dimension that an outer axis of the mesh cuts after an inner one."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def flattened(mesh: Any, name: str) -> Any:
    """The mesh with its axes as one of that name."""
    return mesh._flatten(name)


def symmetric_memory(size: int, group_name: str, device: torch.device) -> Any:
    """`size` bytes that all ranks of a group can address. Raises the errors of drivers where that cannot be.

    torch's symmetric_memory.empty is not used: it would open a pool of the allocator inside another one.
    """
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    return symmetric.rendezvous(memory, group_name)


# FSDP2. A unit has a state, a state has groups (FSDPParamGroup), and a group has parameters (FSDPParam).
def fsdp_exchanges() -> tuple[type, type]:
    """The all-gather and the reduce-scatter of a unit, from which others derive."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    return DefaultAllGather, DefaultReduceScatter


def fsdp_state(module: nn.Module) -> Any:
    """The state of a unit that fully_shard made; None for other modules."""
    get = getattr(module, "_get_fsdp_state", None)
    return None if get is None else get()


def fsdp_states() -> Iterator[Any]:
    """The states of all units and other composable wrappers in this process."""
    from torch.distributed._composable_state import _module_state_mapping

    return (reference() for reference in list(_module_state_mapping.values()))


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of a state; [] for a state of something else, or None."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch had several for a unit
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_parameters(module: nn.Module) -> list[Any]:
    """The FSDPParams of all units of fully_shard in a module."""
    groups = [group for part in module.modules() for group in fsdp_groups(fsdp_state(part))]
    return [parameter for group in groups for parameter in group.fsdp_params]


def fsdp_storages(parameters: Iterable[Any]) -> frozenset[int]:
    """The addresses of the storage objects into which torch gathers FSDPParams.

    The objects stay when torch frees and refills their memory. A parameter has none before its first gather.
    """
    tensors = (t for parameter in parameters for t in (*parameter.all_gather_outputs, *fsdp_inner_tensors(parameter)))
    return frozenset(storage_id(tensor) for tensor in tensors)


def fsdp_hook_ids(state: Any) -> set[int]:
    """The ids of the hooks that fully_shard has put around a unit's forward."""
    return {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}


def fsdp_phase(group: Any) -> str:
    """The phase of a group in the engine: "IDLE", "FORWARD", "PRE_BACKWARD" or "POST_BACKWARD"."""
    return group._training_state.name


def fsdp_reshards(group: Any) -> bool:
    """Whether the group gives up its parameters after forward."""
    return bool(group._reshard_after_forward)


def fsdp_cuts_again(group: Any) -> bool:
    """Whether fewer ranks hold the parameters between forward and backward (reshard_after_forward=<number>)."""
    return group._use_post_forward_mesh


def fsdp_drop_pass(state: Any, group: Any) -> None:
    """Have a group begin anew, as after a pass that ended well."""
    engine = group.comm_ctx
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    engine.all_gather_state = None
    if hasattr(engine, "reduce_scatter_states"):  # since torch 2.13
        engine.reduce_scatter_states.clear()
        engine._last_post_reduce_events.clear()
    else:
        engine.reduce_scatter_state = None
    engine.post_forward_order.clear()
    group._post_forward_indices.clear()
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    state._training_state = group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def fsdp_whole(parameter: Any) -> Any:
    """The gathered nn.Parameter of an FSDPParam; None before its first gather."""
    return getattr(parameter, "_unsharded_param", None)


def fsdp_set_whole(parameter: Any, whole: nn.Parameter) -> None:
    """Have an FSDPParam gather into this nn.Parameter."""
    parameter._unsharded_param = whole


def fsdp_inner_tensors(parameter: Any) -> list[Tensor]:
    """The tensors, beside all_gather_outputs, that torch frees when it shards the parameter again."""
    return parameter._unsharded_inner_tensors


def fsdp_set_inner_tensors(parameter: Any, tensors: list[Tensor]) -> None:
    """Have torch free these tensors when it shards the parameter again."""
    parameter._unsharded_inner_tensors = tensors


def fsdp_shard(parameter: Any) -> Any:
    """This rank's shard as a local tensor of its own class; None where torch keeps it elsewhere."""
    return getattr(parameter, "_sharded_local_tensor", None)


def fsdp_shard_data(parameter: Any) -> Tensor:
    """This rank's shard, padded, in one dimension: what an FSDPParam sends."""
    return parameter._sharded_param_data


def fsdp_shape(parameter: Any) -> tuple[int, ...]:
    """The shape of the whole parameter, as this rank has it when it is gathered."""
    return tuple(parameter._orig_size)


def fsdp_dtensor_spec(parameter: Any) -> Any:
    """The DTensorSpec of a parameter that was a DTensor before fully_shard; None for others."""
    return getattr(parameter, "_unsharded_dtensor_spec", None) or getattr(parameter, "_tp_spec", None)


def fsdp_owners(parameter: Any) -> list[tuple[nn.Module, str]]:
    """The modules that have the parameter, and its name in each."""
    info = parameter._module_info
    modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    return list(zip(modules, names, strict=True))


def fsdp_extensions(parameter: Any) -> Any:
    """What an FSDPParam keeps between fsdp_pre_all_gather and fsdp_post_all_gather."""
    return parameter._extensions_data
