"""sum_parts: summands in the order of ranks, in float32, rounded once."""

import pytest
import torch

from hqsweep.parallel.wire import tokens as module
from hqsweep.parallel.wire.tokens import sum_parts, takes_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)


def summands(lead, ranks, count, dtype, device):
    """parts [lead, ranks, count] of each rank, and what each of them receives: the others' in their order."""
    generator = torch.Generator().manual_seed(ranks)
    scale = 10.0 ** torch.randint(-3, 4, (ranks, lead, ranks, count), generator=generator)
    every = (torch.randn(ranks, lead, ranks, count, generator=generator) * scale).to(dtype).to(device)
    received = [torch.stack([every[o, :, r] for o in range(ranks) if o != r] or [every[r, :, r]]) for r in range(ranks)]
    return every, [other[: ranks - 1] for other in received]


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lead", "ranks", "count"), [(1, 1, 8), (1, 2, 8), (3, 2, 4096), (2, 4, 264), (5, 3, 7), (2, 2, 0)]
)
def test_every_rank_has_the_sum_in_order(lead, ranks, count, dtype, device):
    every, received = summands(lead, ranks, count, dtype, device)
    for rank in range(ranks):
        total = every[0, :, rank].cpu().float()
        for other in range(1, ranks):
            total = total + every[other, :, rank].cpu().float()
        ours = sum_parts(every[rank], received[rank], rank)
        assert ours.dtype == dtype and ours.shape == (lead, count)
        assert torch.equal(ours.cpu(), total.to(dtype))
        into = torch.full((lead, count + 8), torch.nan, dtype=dtype, device=device).flatten()[: lead * count]
        assert sum_parts(every[rank], received[rank], rank, into.view(lead, count)).data_ptr() == into.data_ptr()
        assert torch.equal(into.view(lead, count), ours)


@devices
def test_by_hand(device):
    """1 + 2^-9 + 2^-9 in bfloat16, whose step at 1 is 2^-7: a rounding after each addition would lose 2^-8 both times
    and give 1; so does one rounding, to even, of 1 + 2^-8, and 1 + 2^-8 + 2^-9 is nearer to the next."""
    small = 2.0**-9
    rows = torch.tensor([[[1.0] * 8, [small] * 8, [2 * small] * 8]], device=device).bfloat16()
    for rank, own in enumerate(rows[0]):
        parts = own.expand(1, 3, 8).contiguous()
        received = torch.stack([other for index, other in enumerate(rows[0]) if index != rank])[:, None]
        assert sum_parts(parts, received, rank).tolist() == [[1.0 + 2.0**-7] * 8]


def test_the_kernel_gets_nothing_else():
    parts, received = torch.zeros(2, 2, 8), torch.zeros(1, 2, 8)
    assert takes_parts(parts, received)
    for a, b in ((parts, received.double()), (parts[..., :3], received[..., :3]), (parts, received[:, :1]),
                 (parts.double(), received.double()), (parts.mT.contiguous().mT, received)):  # fmt: skip
        assert not takes_parts(a, b)
        with pytest.raises(ValueError, match=r"it takes \[lead, W, n\] and \[W - 1, lead, n\] of float32"):
            module._sum_parts.__wrapped__(a, b, 0)
    with pytest.raises(ValueError, match="rank 2; it takes"):
        module._sum_parts.__wrapped__(parts, received, 2)


def test_traced_graphs_know_the_shape():
    parts = torch.empty(3, 2, 16, dtype=torch.bfloat16, device="meta")
    assert torch.ops.hqsweep.sum_parts(parts, parts[None, :, 0], 1).shape == (3, 16)
