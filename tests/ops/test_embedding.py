"""Rows of a table, and its gradient, by kernels: those of torch, for a table that ranks share too."""

import pytest
import torch
import torch.nn.functional as F

from hqsweep.ops.vocabulary import by_entry, embed, rows_of_rank, table_gradient, takes_table

pytestmark = pytest.mark.gpu


def tokens_of(count, entries, seed=0):
    """Tokens of which some are the same, a third one entry."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, entries, (count,), generator=generator)
    tokens[::3] = entries // 2
    return tokens.cuda()


@pytest.mark.parametrize(("entries", "width"), [(7, 4), (300, 768), (50, 1500)])
def test_rows_are_those_of_torch(entries, width):
    table, tokens = torch.randn(entries, width, device="cuda"), tokens_of(1001, entries)
    assert takes_table(table, tokens)
    assert torch.equal(embed(tokens, table), F.embedding(tokens, table))
    assert embed(tokens[:0], table).shape == (0, width)


def test_a_token_of_no_rank_is_seen():
    table = torch.randn(8, 64, device="cuda")
    rows = embed(torch.tensor([3, 8, -1], device="cuda"), table)
    assert rows.isnan().all(1).tolist() == [False, True, True]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_rows_of_the_whole(ranks):
    entries, width, count = 20, 256, 500
    table = torch.randn(ranks * entries, width, device="cuda")
    whole = tokens_of(ranks * count, ranks * entries)
    parts, of_rank = table.chunk(ranks), whole.view(ranks, count)
    for rank in range(ranks):
        received = torch.full((ranks - 1, count, width), 7.0, device="cuda")
        for i, other in enumerate(other for other in range(ranks) if other != rank):
            embed(of_rank[rank], parts[other], ranks=ranks, rank=other, out=received[i])
            lacking = of_rank[rank] // entries != other
            assert bool((received[i][lacking] == 7.0).all())  # no more is sent than is needed
        rows = embed(of_rank[rank], parts[rank], ranks=ranks, rank=rank, received=received)
        assert torch.equal(rows, F.embedding(of_rank[rank], table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("entries", "width", "count"), [(7, 8, 5), (300, 768, 4096), (50, 1504, 1000), (3, 64, 33)])
def test_gradients_are_those_of_float64(entries, width, count, dtype):
    tokens, rows = tokens_of(count, entries), torch.randn(count, width, device="cuda").to(dtype)
    table = torch.zeros(entries, width, dtype=torch.float64, device="cuda").index_add_(0, tokens, rows.double())
    gradient = table_gradient(rows, tokens, *by_entry(tokens, entries))
    torch.testing.assert_close(gradient.double(), table, rtol=1e-5, atol=1e-4)  # up to 1,400 rows of an entry
    assert torch.equal(gradient, table_gradient(rows, tokens, *by_entry(tokens, entries)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_bits_of_the_whole_gradient(ranks):
    entries, width, count = 20, 256, 500
    tokens, rows = tokens_of(ranks * count, ranks * entries), torch.randn(ranks * count, width, device="cuda")
    whole = table_gradient(rows, tokens, *by_entry(tokens, ranks * entries)).chunk(ranks)
    own_rows, own_tokens = rows.view(ranks, count, width), tokens.view(ranks, count)
    for rank in range(ranks):
        received = torch.full((ranks - 1, count, width), torch.nan, device="cuda")
        for i, other in enumerate(other for other in range(ranks) if other != rank):
            rows_of_rank(own_tokens[other], own_rows[other], entries, rank, received[i])
        ours = by_entry(tokens, entries, rank)
        gradient = table_gradient(own_rows[rank], tokens, *ours, ranks=ranks, rank=rank, received=received)
        assert torch.equal(gradient, whole[rank])


def test_no_tokens_have_a_gradient_of_zeros():
    tokens = torch.zeros(0, dtype=torch.long, device="cuda")
    gradient = table_gradient(torch.zeros(0, 64, device="cuda"), tokens, *by_entry(tokens, 5))
    assert gradient.shape == (5, 64) and not gradient.any()


def test_other_tables_are_left_to_torch():
    tokens = torch.zeros(3, dtype=torch.long, device="cuda")
    assert not takes_table(torch.zeros(5, 6, device="cuda"), tokens)
    assert not takes_table(torch.zeros(5, 64, device="cuda", dtype=torch.float64), tokens)
    assert not takes_table(torch.zeros(5, 64), tokens.cpu())
