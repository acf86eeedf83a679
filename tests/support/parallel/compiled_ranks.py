"""A GPT that a user's function shares out in torchtitan's order: matrices, then checkpoints around blocks, which are
compiled, then fully_shard; beside one process whose sums are split as those of ranks. Of the ranks along dp_shard the
first compile, and the others do not: to compile takes each rank long, and all exchange the same."""

import torch
from support.parallel.shared_models import build, data, split_sums
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from hqsweep.nn import quantization
from hqsweep.optim import FusedAdam
from hqsweep.parallel.tensor import fsdp_placement, tensor_parallel
from hqsweep.parallel.wire.local import whole_tensor
from hqsweep.train.model import GPT

WRAPPED = "_checkpoint_wrapped_module."


def parallelize(model: GPT, mesh: DeviceMesh) -> GPT:
    tensor_parallel(model, mesh["tp"])
    options = {"mesh": mesh["dp_shard"], "shard_placement_fn": fsdp_placement}
    for index, layer in enumerate(model.layers):
        block = checkpoint_wrapper(layer)
        if mesh["dp_shard"].get_local_rank() == 0:
            block.compile(backend="aot_eager")
        model.layers[index] = fully_shard(block, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "loss")
    return model


def trained(model: GPT) -> list[dict[str, torch.Tensor]]:
    """The loss and the gradients of each of two steps, on the same tokens on all ranks."""
    optimizer, steps = FusedAdam(model.parameters(), lr=1e-3), []
    for step in (1, 2):
        with quantization(seed=1, step=step):
            loss, _ = model.loss(*data(step))
            loss.backward()
        gradients = {name.replace(WRAPPED, ""): p.grad for name, p in model.named_parameters()}
        steps.append({"loss": loss.detach()} | gradients)
        optimizer.step()
        optimizer.zero_grad()
    return steps


def differences(rank: int, recipe: str) -> list[str]:
    """What differs from one process, and gradients that are no DTensors. Gains of norms are sums in another order."""
    mesh, faults = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp")), []
    alone, shared = build({"linear": recipe}), parallelize(build({"linear": recipe}), mesh)
    with split_sums(2):
        expected = trained(alone)
    for step, (own, one) in enumerate(zip(trained(shared), expected, strict=True), start=1):
        for name, value in one.items():
            got = whole_tensor(own[name])
            close = name.endswith("norm.weight") and torch.allclose(got, value, rtol=1e-3, atol=1e-6)
            spread = name == "loss" or isinstance(own[name], DTensor)
            faults += [] if spread and (close or torch.equal(got, value)) else [f"step {step}: {name}"]
    return faults
