"""Layers of which two ranks share the matrices, compiled, and the same eagerly."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hqsweep.dist.local import local
from hqsweep.nn import LayerNormMLP, quantization
from hqsweep.parallel.tensor import fsdp_placement, tensor_parallel

SHAPE = (2, 64, 64)


def differences(rank: int, recipe: str) -> list[str]:
    """Names of what differs in a step: outputs and gradients. Matrices go over ranks first, then the layer is compiled,
    then sharded, as torchtitan does it."""
    mesh, results = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = LayerNormMLP(64, 128, name="layer", recipe=recipe)
        tensor_parallel(layer, mesh["tp"])
        if compiled:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=fsdp_placement)
        x = torch.arange(float(torch.Size(SHAPE).numel())).sin().view(SHAPE)
        x = x.chunk(2, 1)[rank].contiguous().requires_grad_()
        with quantization(step=1):
            y = layer(x)
            y.square().sum().backward()
        results.append(_values(layer, x, y))
    one, other = results
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def _values(layer: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    gradients = {name: local(p.grad) for name, p in layer.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    return {"y": y.detach(), "dx": x.grad} | gradients
