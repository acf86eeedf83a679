"""Uses of fully_shard beside training: policies, states, the meta device, converted models."""

import torch
from support.parallel.fsdp2_converted import held_llama, held_policy
from support.parallel.fsdp2_ranks import Holder, differing, held, mesh
from support.parallel.fsdp2_training import batch, build, shard, train, weights_that_differ
from support.ranks import rank_device
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hqsweep import convert
from hqsweep.nn import quantization
from hqsweep.quant import HybridQuantizedTensor

TEXT = "nvfp4|mxfp8"


def policy(rank):
    """dtypes of the whole weight and of the sharded gradient under a policy of bf16 with sums in FP32."""
    model = build(TEXT)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with quantization(seed=0, step=1):
        model(batch(1)).float().square().mean().backward()
    block = model.blocks[0]
    gradient = block.a.weight.grad
    block.unshard()
    return str(block.a.weight.dtype), str(gradient.dtype), bool(gradient.to_local().isfinite().all())


def plain_policy(rank):
    """The same of a plain weight, and the bytes of it that are there once its linear has run, before its unit is
    sharded again."""
    model = build(TEXT, held=False)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    weights, left = [], []
    model.blocks[0].a.register_forward_hook(lambda module, *_: weights.append(module.weight))
    model.blocks[0].a.register_forward_hook(lambda *_: left.append(weights[0].value.untyped_storage().nbytes()))
    with quantization(seed=0, step=1):
        model(batch(1)).float().square().mean().backward()
    return str(weights[0].dtype), str(model.blocks[0].a.weight.grad.dtype), left


def ignored(rank):
    """A weight that fully_shard ignores stays what it is, and trains beside the others."""
    model = build(TEXT)
    left = model.blocks[0].a.weight
    shard(model, ignored_params={left})
    with quantization(seed=0, step=1):
        model(batch(1)).float().square().mean().backward()
    return type(model.blocks[0].a.weight.data).__name__, left.grad is not None, type(model.blocks[0].b.weight).__name__


def plain_ignored(rank):
    """The same of plain weights."""
    model = build(TEXT, held=False)
    left = model.blocks[0].a.weight
    shard(model, ignored_params={left})
    with quantization(seed=0, step=1):
        model(batch(1)).float().square().mean().backward()
    return type(model.blocks[0].a.weight.data).__name__, left.grad is not None, type(model.blocks[0].b.weight).__name__


def states(rank):
    """Faults of a state_dict that is loaded into another model, and of values that are."""
    model, other, faults = shard(build(TEXT)), shard(build(TEXT)), []
    train(model)
    state = model.state_dict()
    name = "blocks.0.a.weight"
    if not isinstance(state[name].to_local(), HybridQuantizedTensor):
        faults.append("state_dict decodes")
    other.load_state_dict(state)
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own, new = own.to_local(), new.to_local()
        if isinstance(own, HybridQuantizedTensor):
            faults += differing(own, new)
    whole = state[name].full_tensor()
    values = DTensor.from_local(torch.ones(state[name].to_local().shape), mesh(), state[name].placements)
    with torch.no_grad():
        other.blocks[0].a.weight.copy_(values)
    one = other.blocks[0].a.weight.full_tensor()
    if whole.shape != state[name].shape or not torch.equal(one, torch.ones_like(one)):
        faults.append("values")
    return faults


def on_meta(rank):
    """Faults of a model that is sharded on the meta device, then allocated and written."""
    whole = held(TEXT, (80, 64))
    module = Holder(torch.empty_like(whole, device="meta"))
    fully_shard(module, mesh=mesh())
    module.to_empty(device=rank_device())
    part = module.weight.to_local()
    rows = whole.dequantize().split(40)[rank][: len(part)]
    with torch.no_grad():
        part.quantize_(rows, key=whole.metadata.key, group=mesh().get_group())
    expected = HybridQuantizedTensor.quantize(whole.dequantize(), whole.quantizer, key=whole.metadata.key)
    module.unshard()
    return differing(module.weight, expected)


def converted(rank):
    """Losses of a converted model, sharded and not."""
    losses = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64)).to(rank_device(), torch.bfloat16)
        convert(model, "mxfp8")
        if sharded:
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh())
            fully_shard(model, mesh=mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (1, 2):
            with quantization(seed=0, step=step):
                loss = model(batch(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:2] == losses[2:]


def uses(rank):
    of_own = (policy, plain_policy, ignored, plain_ignored, states, on_meta)
    return {use.__name__: use(rank) for use in (*of_own, converted, held_llama, held_policy)}


def compiled(rank):
    """Of held weights, and of plain ones: whether compiled blocks under fully_shard train as eager
    ones, the weights that differ, and the numbers of graphs and of breaks. The first rank compiles, and
    the others do not: to compile takes long, and all exchange the same."""
    results = []
    for options in ({}, {"held": False}):
        torch.compiler.reset()
        counters.clear()
        alone = build(TEXT, **options)
        expected = train(alone)
        model = build(TEXT, **options)
        for block in model.blocks if rank == 0 else ():
            block.compile(backend="aot_eager")
        same = train(shard(model)) == expected
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        results.append((same, weights_that_differ(model, alone), graphs, breaks))
    return results
