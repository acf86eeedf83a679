"""A model of held weights, or of plain ones, that ranks train under fully_shard, all on the same data, as one process
trains it.

The mean of equal gradients is each of them, so that losses and weights are those of one process, to the byte.
"""

from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import torch
import torch.distributed as dist
from support.parallel.fsdp2_ranks import differing, mesh
from support.ranks import rank_device
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, Linear, quantization, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.parallel.data import gather_in_linear_dtype
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.recipe import LinearQuantizers, Recipe

WIDTH, HIDDEN, ROWS, STEPS = 64, 80, 64, 2


class Block(nn.Module):
    """x + b(relu(a(x))), and experts between them; single: of which one parameter has all weights."""

    def __init__(self, name, text, recompute=None, single=True):
        super().__init__()
        quantizers = LinearQuantizers.parse(text, "test")
        self.a = Linear(WIDTH, HIDDEN, name=f"{name}.a", recipe=quantizers)
        self.b = Linear(HIDDEN, WIDTH, name=f"{name}.b", recipe=quantizers)
        options = GroupedLinearOptions(single_grouped_weight=single)
        recipe = Recipe.from_config({"linear": text})
        self.experts = GroupedLinear(3, HIDDEN, HIDDEN, name=f"{name}.e", recipe=recipe, options=options)
        self.recompute = recompute

    def inner(self, x):
        h = self.a(x).relu()
        return x + self.b(self.experts(h, [16, 32, 16]))

    def forward(self, x):
        return self.inner(x) if self.recompute is None else checkpoint(self.inner, x, use_reentrant=self.recompute)


class Model(nn.Module):
    """Two blocks, then a plain linear."""

    def __init__(self, text, inside=None, around=None, single=True):
        super().__init__()
        self.blocks = nn.ModuleList([Block(f"l{i}", text, inside, single) for i in range(2)])
        self.head = nn.Linear(WIDTH, 8, bias=False, dtype=torch.bfloat16)
        self.around = around

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.around is None else checkpoint(block, x, use_reentrant=self.around)
        return self.head(x)


def build(text, *, held=True, **options):
    torch.manual_seed(0)
    with quantized_model_init(enabled=held), quantization(seed=0, step=0):
        return Model(text, **options).to(rank_device())


def batch(step, part=0):
    return draw("normal", ROWS, WIDTH, 10 * step + part).to(rank_device()).requires_grad_()


def train(model, *, microbatches=1, held_back=None, between=None, saving=nullcontext):
    """Losses of a few steps. held_back(model, last): called before each microbatch; between(model): after each step;
    saving(): around each forward."""
    optimizer, losses = FusedAdam(model.parameters(), lr=1e-2), []
    for step in range(1, STEPS + 1):
        for part in range(microbatches):
            if held_back:
                held_back(model, part == microbatches - 1)
            with quantization(seed=0, step=step, microbatch=part):
                with saving():
                    loss = model(batch(step, part)).float().square().mean() / microbatches
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if between:
            between(model)
    return losses


def columns_of_held(parameter):
    """Shard(1) for what is held quantized: columns of matrices, and rows of every expert's."""
    return Shard(1) if isinstance(parameter, HybridQuantizedTensor) else None


def shard(model, raf=True, **options):
    """Plain weights travel in the dtype of their linear."""
    options = {"mesh": mesh(), "reshard_after_forward": raf} | options
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    gather_in_linear_dtype(model)
    return model


def accumulate(model, last):
    """Accumulate as torchtitan does: nothing is reduced, or sharded again, before the last microbatch."""
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


def reduce_last(model, last):
    """Accumulate as runs do: weights are sharded again after each microbatch."""
    model.set_requires_gradient_sync(last)


def evaluate(model):
    model.eval()
    with torch.no_grad(), quantization(seed=0, step=1):
        model(batch(9))
    model.train()


def unshard_by_hand(model):
    for block in model.blocks:
        block.unshard()


def hsdp(ranks_that_share):
    size = dist.get_world_size()
    shape = (size // ranks_that_share, ranks_that_share)
    return init_device_mesh(rank_device().type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


SAVING = partial(save_on_cpu, pin_memory=True)
"""Without it nothing is copied on the CPU."""
CASES = {
    "reshards": ({}, shard, {}),
    "keeps": ({}, partial(shard, raf=False), {}),
    "root keeps": ({}, partial(shard, raf=None), {}),
    "checkpoint inside": ({"inside": False}, shard, {}),
    "reentrant checkpoint inside": ({"inside": True}, shard, {}),
    "checkpoint around": ({"around": False}, shard, {}),
    "reentrant checkpoint around": ({"around": True}, shard, {}),
    "accumulates": ({}, shard, {"microbatches": 3, "held_back": accumulate}),
    "accumulates and keeps": ({}, partial(shard, raf=False), {"microbatches": 3, "held_back": accumulate}),
    "accumulates and reshards": ({}, shard, {"microbatches": 3, "held_back": reduce_last}),
    "reduces each microbatch": ({}, shard, {"microbatches": 3}),
    "evaluates between": ({}, shard, {"between": evaluate}),
    "evaluates between and keeps": ({}, partial(shard, raf=False), {"between": evaluate}),
    "unshards by hand": ({}, shard, {"between": unshard_by_hand}),
    "saves on the CPU": ({}, shard, {"saving": SAVING}),
    "saves on the CPU and recomputes": ({"inside": False}, shard, {"saving": SAVING}),
    "offloads": ({}, partial(shard, offload_policy=CPUOffloadPolicy(pin_memory=False)), {}),
}
PLAIN_CASES = [
    "reshards", "keeps", "root keeps", "reentrant checkpoint inside", "checkpoint around", "accumulates",
    "accumulates and keeps", "evaluates between", "evaluates between and keeps", "unshards by hand",
    "saves on the CPU and recomputes", "offloads",
]  # fmt: skip
"""Cases that plain weights train in, too."""
HYBRID_CASES = {
    "shards of one rank": ({}, lambda model: shard(model, mesh=hsdp(1)), {}),
    "shards of two ranks": ({}, lambda model: shard(model, mesh=hsdp(2)), {}),
}


to_two = partial(shard, raf=2)
MESH_CASES = {"reshards to two ranks": ({}, to_two, {})}
HELD_MESH_CASES = {
    "by columns": ({}, partial(shard, shard_placement_fn=columns_of_held), {}),
    "by columns, and reshards to two ranks": ({}, partial(to_two, shard_placement_fn=columns_of_held), {}),
    "reshards to two ranks and recomputes": ({"inside": False}, to_two, {}),
    "reshards to two ranks and accumulates": (
        {},
        to_two,
        {"microbatches": 2, "held_back": accumulate, "between": evaluate},
    ),
}


@cache
def trained_alone(text, held, microbatches):
    """A model, and its losses, that one process has trained, without recomputing anything."""
    model = build(text, held=held)
    return model, train(model, microbatches=microbatches)


def trained(rank, texts, names, *, held=True):
    """(text, case) -> what differs from one process."""
    faults, cases = {}, CASES | HYBRID_CASES | MESH_CASES | HELD_MESH_CASES
    for text in texts:
        for name in names:
            options, sharded, run = cases[name]
            alone, expected = trained_alone(text, held, run.get("microbatches", 1))
            model = sharded(build(text, held=held, **options))
            got = train(model, **run)
            differences = [] if got == expected else [(got, expected)]
            differences += weights_that_differ(model, alone)
            if differences:
                faults[text, name] = differences
    return faults


def plainly_trained(rank, names):
    """The same of weights in high precision."""
    return trained(rank, ["nvfp4|mxfp8@rowwise_dequantized"], names, held=False)


def offloaded(rank, texts):
    """text -> what differs where torch keeps shards on the CPU, and an optimizer updates them there: the first loss
    from that of one process, and what is gathered from the quantized form of the masters."""
    faults = {}
    for text in texts:
        _, (expected, *_) = trained_alone(text, True, 1)
        model = shard(build(text), offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        with quantization(seed=0, step=1):
            loss = model(batch(1)).float().square().mean()
            loss.backward()
        optimizer.step()
        differences = [] if loss.item() == expected else [(loss.item(), expected)]
        for block, layer in product(model.blocks, ("a", "b", "experts")):
            of_shards = getattr(block, layer).weight
            assert of_shards.device.type == "cpu"
            master = optimizer.master_param(of_shards).full_tensor()
            block.unshard()
            weight = getattr(block, layer).weight
            assert weight.device.type == rank_device().type
            master = master.to(weight.device)
            wanted = type(weight).quantize(master, weight.quantizer, source_dtype=weight.source_dtype)
            differences += [f"{layer}.{name}" for name in differing(weight, wanted)]
            block.reshard()
        if differences:
            faults[text] = differences
    return faults


def weights_that_differ(model, alone):
    names = []
    for block, whole in zip(model.blocks, alone.blocks, strict=True):
        block.unshard()
        for layer in ("a", "b", "experts"):
            a, b = getattr(block, layer).weight, getattr(whole, layer).weight
            names += [f"{layer}.{name}" for name in (differing(a, b) if isinstance(b, HybridQuantizedTensor) else [])]
        block.reshard()
    model.reshard()
    plain = [
        (a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True) if type(b.data) is torch.Tensor
    ]
    return names + [str(b.shape) for a, b in plain if not torch.equal(a.full_tensor(), b)]
