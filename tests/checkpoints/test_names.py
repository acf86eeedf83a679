"""Llama's q and k: the rows of torchtitan's weights, turned by pairs, are those of Hugging Face's, turned by halves."""

import torch
from support.checkpoints.titan import pairs_of_halves

from hqsweep.checkpoints.names import halves_of_pairs

HEADS, D, K, T = 3, 8, 16, 5


def test_the_rows_come_back() -> None:
    rows = torch.randn(HEADS * D, K)
    assert torch.equal(halves_of_pairs(pairs_of_halves(rows, HEADS), HEADS), rows)


def test_attention_scores_are_the_same() -> None:
    """Scores of complex rotations of pairs (Llama's own code) against rotations of halves (Hugging Face's)."""
    q, k = torch.randn(2, HEADS * D, K, dtype=torch.float64)
    x = torch.randn(T, K, dtype=torch.float64)
    angles = torch.outer(torch.arange(T, dtype=torch.float64), 10000.0 ** (-torch.arange(0, D, 2) / D))

    def by_pairs(w: torch.Tensor) -> torch.Tensor:
        heads = (x @ w.T).unflatten(1, (HEADS, D // 2, 2))
        turned = torch.view_as_complex(heads) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(2)

    def by_halves(w: torch.Tensor) -> torch.Tensor:
        heads = (x @ w.T).unflatten(1, (HEADS, D))
        cos, sin = (function(angles).repeat(1, 2)[:, None] for function in (torch.cos, torch.sin))
        one, two = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-two, one], dim=-1) * sin

    theirs = torch.einsum("ihd,jhd->hij", by_pairs(q), by_pairs(k))
    ours = (by_halves(halves_of_pairs(w, HEADS)) for w in (q, k))
    torch.testing.assert_close(torch.einsum("ihd,jhd->hij", *ours), theirs)
