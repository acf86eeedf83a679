"""What TransformerEngine's masks, windows and biases hide and add: one tensor for torch's attention.

The masks of TransformerEngine are True where a position is hidden.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hqsweep.compat.arguments import shown
from hqsweep.errors import UserError

ALIKE = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}
Masks = Tensor | Sequence[Tensor] | None
NO_WINDOW = (-1, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Bias:
    """What is added to scores."""

    kind: str = "no_bias"
    """"no_bias", "pre_scale_bias", "post_scale_bias" or "alibi"."""
    values: Tensor | None = None
    """[1 or B, H, Tq, Tk]."""
    slopes: Tensor | None = None
    """[H] or [B, H], of alibi."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Hidden:
    """Which positions a call hides."""

    mask_type: str = "causal"
    window: Sequence[int] | None = None
    """How far to the left and to the right a query attends; -1: everything."""
    bottom_right: bool | None = None
    """Whether the diagonal of windows and alibi ends at the last query and key; None: unless the mask is causal."""
    mask: Masks = None
    """[B, 1, 1, T] of paddings, a tuple for queries and keys, or [B, H, Tq, Tk] of an arbitrary mask; True: hidden."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_type", ALIKE.get(self.mask_type, self.mask_type))

    @property
    def causal(self) -> bool:
        """Whether later keys are hidden."""
        return "causal" in self.mask_type

    @property
    def ends_at_last(self) -> bool:
        """Whether diagonals end at the last query and the last key."""
        if self.mask_type in ("causal", "padding_causal"):
            return False
        return "bottom_right" in self.mask_type or self.bottom_right is not False

    @property
    def is_plain(self) -> bool:
        """Whether torch's is_causal says it all, for as many queries as keys."""
        plain = self.mask_type in ("no_mask", "causal", "causal_bottom_right")
        return plain and tuple(self.window or NO_WINDOW) in (NO_WINDOW, (-1, 0)) and not self._is_only_windowed

    @property
    def _is_only_windowed(self) -> bool:
        return not self.causal and tuple(self.window or NO_WINDOW) == (-1, 0)

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query attends to a key, broadcast to [B, H, Tq, Tk]; None: everywhere. UserError for a mask that
        is missing or has other shapes."""
        parts = [self._diagonals(queries, keys, device)]
        if "padding" in self.mask_type:
            parts.append(self._padded(queries, keys))
        if self.mask_type == "arbitrary":
            if not isinstance(self.mask, Tensor):
                raise UserError("attn_mask_type='arbitrary' takes attention_mask, True where a position is hidden")
            parts.append(~self.mask.bool())
        kept = [part for part in parts if part is not None]
        allowed = kept[0] if kept else None
        for part in kept[1:]:
            allowed = allowed & part
        return allowed

    def _diagonals(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        left, right = tuple(self.window or NO_WINDOW)
        right = 0 if self.causal else right
        if left == right == -1:
            return None
        away = distances(queries, keys, self._shift(queries, keys, device), device)
        allowed = torch.ones_like(away, dtype=torch.bool)
        if right != -1:
            allowed &= away <= right
        return allowed if left == -1 else allowed & (away >= -left)

    def _shift(self, queries: int, keys: int, device: torch.device) -> int | Tensor:
        """What is added to a query's position before keys are compared with it."""
        if not self.ends_at_last:
            return 0
        if "padding" in self.mask_type:
            hidden_q, hidden_k = self._pair()
            return ((~hidden_k).sum(-1) - (~hidden_q).sum(-1)).view(-1, 1, 1, 1).to(device)
        return keys - queries

    def _padded(self, queries: int, keys: int) -> Tensor:
        hidden_q, hidden_k = self._pair()
        if hidden_q.shape[-1] != queries or hidden_k.shape[-1] != keys:
            raise UserError(
                f"attention_mask hides {hidden_q.shape[-1]} queries and {hidden_k.shape[-1]} keys, where there are"
                f" {queries} and {keys}"
            )
        return ~hidden_q[:, None, :, None] & ~hidden_k[:, None, None, :]

    def _pair(self) -> tuple[Tensor, Tensor]:
        """Which queries and which keys are padding, [B, T] each."""
        pair = self.mask if isinstance(self.mask, Sequence) else (self.mask, self.mask)
        if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            raise UserError(
                f"attn_mask_type={self.mask_type!r} takes attention_mask [B, 1, 1, T], a tuple of two, or cu_seqlens;"
                f" it is {shown(self.mask)}"
            )
        return tuple(part.bool().flatten(1) for part in pair)

    def scores(self, bias: Bias, shape: Sequence[int], scale: float, device: torch.device) -> Tensor | None:
        """What is added to scores after they are scaled, float32, -inf where a position is hidden; or None.

        shape: [B, H, Tq, Tk].
        """
        allowed, added = self.allowed(*shape[-2:], device), None
        if bias.kind == "alibi":
            slopes = alibi_slopes(shape[1]).to(device) if bias.slopes is None else bias.slopes.float()
            away = distances(*shape[-2:], self._shift(*shape[-2:], device), device).abs()
            added = -slopes.reshape(-1, shape[1], 1, 1) * away
        elif bias.kind != "no_bias":
            if bias.values is None:
                raise UserError(f"core_attention_bias_type={bias.kind!r} takes core_attention_bias")
            added = bias.values.float() * (scale if bias.kind == "pre_scale_bias" else 1.0)
        if allowed is None or added is None:
            return added if allowed is None else torch.zeros((), device=device).masked_fill(~allowed, -math.inf)
        return added.masked_fill(~allowed, -math.inf)


def distances(queries: int, keys: int, shift: int | Tensor, device: torch.device) -> Tensor:
    """Key minus query, [Tq, Tk], after the queries are shifted."""
    rows = torch.arange(queries, device=device)[:, None]
    return torch.arange(keys, device=device)[None] - rows - shift


def alibi_slopes(heads: int) -> Tensor:
    """float32 [H]: 2^(-8 i / H) for powers of two, and slopes between them for other numbers (Press et al.)."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return torch.tensor(slopes)


def paddings(cu_seqlens: Tensor, length: int) -> Tensor:
    """Which positions of each sequence are padding, bool [B, length], from int32 [B + 1]."""
    sizes = cu_seqlens.diff()
    return torch.arange(length, device=sizes.device)[None] >= sizes[:, None]
