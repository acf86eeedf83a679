"""What the ranks of tests of FSDP2 run."""

import torch
import torch.distributed as dist
from ranks import rank_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


def held(text, shape, **options):
    """A tensor [N, K], or [E, N, K], in the formats of a text."""
    x = draw("normal", torch.Size(shape[:-1]).numel(), shape[-1]).view(shape).to(rank_device())
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


def gathered(rank, texts, shapes):
    """(text, shape) -> the buffers that are not those of the whole after a gather, and after one more."""
    faults = {}
    for text, shape in ((text, shape) for shape in shapes for text in texts if fits(text, shape)):
        whole = held(text, shape)
        module = Holder(whole.clone())
        fully_shard(module, mesh=mesh())
        faults[text, shape] = []
        for _ in range(2):
            module.unshard()
            faults[text, shape] += differing(module.weight, whole)
            module.reshard()
    return {case: names for case, names in faults.items() if names}
