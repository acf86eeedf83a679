"""What the ranks of tests of FSDP2 run."""

import torch
import torch.distributed as dist
from cases import FEW
from support.ranks import rank_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor, HybridQuantizer

KEY = RngKey(seed=3, slot="w", step=5)


def mesh():
    """All ranks along one axis."""
    return init_device_mesh(rank_device().type, (dist.get_world_size(),))


class Holder(nn.Module):
    """A module with one weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def drawn(shape, seed):
    """Values of a tensor of this shape."""
    return draw("normal", torch.Size(shape[:-1]).numel(), shape[-1], seed).view(shape).to(rank_device())


def held(text, shape, **options):
    """A tensor [N, K], or [E, N, K], in the formats of a text."""
    x = drawn(shape, 0)
    kind = HybridQuantizedTensor if len(shape) == 2 else GroupedTensor
    return kind.quantize(x, HybridQuantizer.parse(text), key=KEY, **options)


def bytes_of(buffers):
    """Buffers as bytes, to compare NaN and -0."""
    return {name: buffer.contiguous().view(torch.uint8) for name, buffer in buffers.items()}


def differing(a, b):
    """The buffers that differ, by name."""
    a, b = bytes_of(a.buffers), bytes_of(b.buffers)
    return [name for name in a if not torch.equal(a[name], b[name])] + sorted(a.keys() ^ b.keys())


def fits(text, shape):
    """Whether the formats hold a tensor of this shape."""
    kind = HybridQuantizedTensor if len(shape) == 2 else GroupedTensor
    try:
        kind.empty(shape, HybridQuantizer.parse(text), device="meta")
    except UserError:
        return False
    return True


def gathered(rank, texts, shapes, others=()):
    """(text, shape, axis that is cut) -> the buffers that are not those of the whole after a gather, after one more,
    and, of axes but the first, after other values were written. others: more shapes, with such an axis. FEW come in
    all shapes, each other text in every third of those that it fits."""
    faults, ranks = {}, mesh()
    by_dim = [*((shape, 0) for shape in shapes), *others]
    cases = [(text, shape, dim) for text in texts for shape, dim in by_dim if fits(text, shape)]
    rest = [case for case in cases if case[0] not in FEW]
    for text, shape, dim in [case for case in cases if case[0] in FEW] + rest[::3]:
        whole = held(text, shape)
        module, names = Holder(whole.clone()), []
        fully_shard(module, mesh=ranks, shard_placement_fn=lambda _, dim=dim: Shard(dim))
        for time in range(3 if dim else 2):
            if time == 2:
                values = drawn(shape, 7)
                module.weight.to_local().quantize_(values.chunk(ranks.size(), dim)[rank], key=KEY)
                whole.quantize_(values, key=KEY)
            module.unshard()
            names += differing(module.weight, whole)
            module.reshard()
        if names:
            faults[text, shape, dim] = names
    return faults
