"""Rows at places that only the device knows, beside torch's own indexing."""

import pytest
import torch

from hqsweep.ops.experts import copy_rows, expert_places

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.uint8, 48), (torch.float32, 3)])
def test_rows_go_where_the_index_says(device, dtype, width):
    rows = torch.randint(0, 200, (9, width), device=device).to(dtype)
    index = torch.tensor([8, -1, 0, 0, -1, 3, 7], device=device)
    out = torch.full((7, width), 77, device=device).to(dtype)
    copy_rows(rows, index, out)
    expected = [77 if i < 0 else rows[i].tolist() for i in index.tolist()]
    assert out.tolist() == [row if isinstance(row, list) else [row] * width for row in expected]


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_change_nothing(device):
    out = torch.ones(3, 16, device=device)
    copy_rows(out[:0], torch.full((3,), -1, device=device), out)
    assert out.eq(1).all()


def drawn(ranks, held, seed):
    """The rows of each rank for each expert, as many of each rank."""
    counts = torch.randint(0, 9, (ranks, ranks * held), generator=torch.Generator().manual_seed(seed))
    counts[:, seed % (ranks * held)] = 0
    counts[:, -1] += int(counts.sum(dim=1).max()) - counts.sum(dim=1)
    return counts


@pytest.mark.feature("H15")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("ranks", "held", "multiple"), [(2, 4, 1), (3, 2, 32), (4, 1, 16), (1, 3, 8)])
def test_places_are_those_of_a_sort(device, ranks, held, multiple):
    """Beside a list of all rows, sorted by expert, then by rank, and filled up, in Python."""
    counts = drawn(ranks, held, ranks)
    rows = int(counts[0].sum())
    for rank in range(ranks):
        lists = [[] for _ in range(held)]
        index_at = [torch.arange(ranks * held).repeat_interleave(counts[source]).tolist() for source in range(ranks)]
        for source, experts in enumerate(index_at):
            for row, expert in enumerate(experts):
                if expert // held == rank:
                    lists[expert % held].append((source, row))
        at = [entry for e, own in enumerate(lists) for entry in own + [("fills", e)] * (-len(own) % multiple)]
        sizes = torch.tensor([len(own) + -len(own) % multiple for own in lists])
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(device)
        here = counts[:, rank * held : (rank + 1) * held].cumsum(0).to(device)
        found = expert_places(counts.to(device), here, offsets, rank, rows, len(at) + 5)
        others = [source for source in range(ranks) if source != rank]
        expected = [(-1, -1, -1)] * (len(at) + 5)
        for place, (source, row) in enumerate(at):
            expected[place] = (
                (-1, -1, row) if source == "fills" else
                (row, -1, -1) if source == rank else (-1, others.index(source) * rows + row, -1)
            )  # fmt: skip
        assert list(zip(*(part.tolist() for part in found[:3]), strict=True)) == expected
        there = [[at.index((s, row)) if (s, row) in at else -1 for row in range(rows)] for s in range(ranks)]
        to = [expert // held for expert in index_at[rank]]
        leaving = [[row if to[row] == other else -1 for row in range(rows)] for other in range(ranks)]
        returning = [-1 if to[row] == rank else others.index(to[row]) * rows + row for row in range(rows)]
        assert [part.tolist() for part in found[3:]] == [there, leaving, returning]
