"""gather_to_first: the objects of all ranks on the first, with the bits, dtypes and shapes of their tensors."""

import torch
from support.ranks import run_ranks

from hqsweep.ops.stats import OutputSums
from hqsweep.parallel.wire.collectives import gather_to_first

DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)


def value(rank):
    """What a rank sends: tensors of many shapes among other things, one of them twice, and views."""
    x = torch.arange(12.0).view(3, 4) + rank
    tensors = [each.to(dtype) for dtype in DTYPES for each in (x, x.t(), x[1:2, 2], x[0, 0], x[:0])]
    return {
        "tensors": tensors,
        "again": [tensors[0]] * 2,
        "sums": OutputSums(1.0, 2.0, 3.0, 4.0, float(rank)),
        rank: [],
    }


def gathered(rank):
    return gather_to_first(value(rank)), gather_to_first(rank)


def test_the_first_has_what_every_rank_sent():
    (values, ranks), *others = run_ranks(3, gathered)
    assert ranks == [0, 1, 2] and others == [(None, None)] * 2
    for rank, own in enumerate(values):
        sent = value(rank)
        assert own.keys() == sent.keys() and own["sums"] == sent["sums"]
        tensors, expected = own["tensors"] + own["again"], sent["tensors"] + sent["again"]
        assert [(x.dtype, x.shape) for x in tensors] == [(x.dtype, x.shape) for x in expected]
        assert all(torch.equal(a.double(), b.double()) for a, b in zip(tensors, expected, strict=True))
