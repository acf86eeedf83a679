"""Converted models of held weights under fully_shard, against plain converted ones."""

import torch
from support.parallel.fsdp2_ranks import mesh
from support.parallel.fsdp2_wire import Counting
from support.ranks import rank_device
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hqsweep import convert
from hqsweep.models.held import held_parts
from hqsweep.nn import quantization, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.parallel.shards.fsdp_state import groups_of

STEPS = 3
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def parallelize(model: nn.Module, recipe: str) -> nn.Module:
    """What a function of torchtitan's kind does: convert, recompute layers, then fully_shard layer by layer."""
    with quantized_model_init(preserve_high_precision_init_val=True), quantization(seed=0):
        conversion = convert(model, recipe, head=True)
    assert not conversion.plain and len(list(held_parts(model))) == len(conversion.modules)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def train(model: nn.Module, loss_of) -> list[float]:
    """Losses; every rank has the same data, so that the mean of gradients is each of them."""
    optimizer, losses = FusedAdam(model.parameters(), lr=1e-2), []
    for step in range(1, STEPS + 1):
        with quantization(seed=0, step=step):
            loss = loss_of(model, step)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held_llama(rank: int) -> tuple[bool, float]:
    """Whether a Llama trains as a plain one in one process, and bytes an element of the first gather of a layer, of
    whose elements the gains of norms, float32, are none."""
    from support.models.llamas import llama, loss_of

    alone, model = (llama(attn_implementation="eager").to(rank_device()) for _ in range(2))
    convert(alone, "format:mxfp8", head=True)
    layer = parallelize(model, "format:mxfp8").model.layers[0]
    [group] = groups_of(layer)
    counter = Counting(group._all_gather_comm)
    layer.set_custom_all_gather(counter)
    elements = sum(weight.numel() for _, _, weight in held_parts(layer))
    gains = 4 * sum(p.numel() for name, p in layer.named_parameters() if "norm" in name)
    same = train(model, loss_of) == train(alone, loss_of)
    return same, (counter.sent[0] - gains) / elements


def held_policy(rank: int) -> bool:
    """Whether a model that is one unit, of which a policy gathers all in bfloat16, trains with held weights as it does
    with plain ones."""
    losses = []
    for held in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64)).to(rank_device())
        with quantized_model_init(enabled=held, preserve_high_precision_init_val=True):
            convert(model, "nvfp4|mxfp8", dtype=torch.bfloat16 if held else None)
        assert len(list(held_parts(model))) == 2 * held
        fully_shard(model, mesh=mesh(), mp_policy=POLICY)
        losses.append(train(model, _squares))
    return losses[0] == losses[1]


def _squares(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(rank_device())
    return model(x).float().square().mean()
