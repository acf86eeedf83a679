"""Rotary positions by TransformerEngine's names: angles as a tensor, which queries and keys are rotated by."""

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError


class RotaryPositionEmbedding(nn.Module):
    """Angles of positions, float32 [S, 1, 1, dim]: position * rotary_base^(-2i / dim) (Su et al., arXiv 2104.09864).

    rotary_percent: the part of dim that is rotated. Pairs are (i, i + dim / 2), or (2i, 2i + 1) if interleaved. With
    seq_len_interpolation_factor and pretrained_max_position_embeddings positions are divided (arXiv 2306.15595).
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.factor, self.pretrained = seq_len_interpolation_factor, pretrained_max_position_embeddings
        self.interleaved = interleaved
        powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**powers)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions offset to offset + max_seq_len - 1."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        if self.factor is not None and self.pretrained is not None:
            longer = max_seq_len > self.pretrained * self.factor
            positions = positions / (max_seq_len / self.pretrained if longer else self.factor)
        angles = torch.outer(positions, self.inv_freq.float())
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([angles, angles], dim=-1)
        return angles[:, None, None]


def rotated(x: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [B, H, T, E] rotated by angles [S >= T, 1, 1, dim <= E]; the rest of the width stays. Computed in float32.

    UserError for fewer angles than positions, or wider ones than the heads.
    """
    length, width = x.shape[-2], angles.shape[-1]
    if angles.shape[0] < length or width > x.shape[-1]:
        raise UserError(
            f"rotary_pos_emb {list(angles.shape)} is too small for {length} positions, or too wide for heads of"
            f" {x.shape[-1]}"
        )
    angles = angles[:length].reshape(length, width).to(x.device, torch.float32)
    turned, rest = x[..., :width].float(), x[..., width:]
    if interleaved:
        half = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    else:
        half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], dim=-1)
    return torch.cat([(turned * angles.cos() + half * angles.sin()).to(x.dtype), rest], dim=-1)
