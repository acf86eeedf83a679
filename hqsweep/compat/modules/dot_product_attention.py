"""transformer_engine.pytorch.DotProductAttention, by its name.

In high precision torch's scaled_dot_product_attention computes it. Under a recipe with low precision for "dpa" it is
hqsweep.nn's attention, whose six products run on quantized operands.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.checkpoint_keys import TakesKeys
from hqsweep.compat.contexts import checkpoint
from hqsweep.compat.modules.activation_dtype import activations
from hqsweep.compat.modules.masks import Bias, Hidden, paddings
from hqsweep.compat.modules.parts import ranks_of
from hqsweep.compat.signatures import DOT_PRODUCT_ATTENTION, OF_DOT_PRODUCT_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.context import high_precision
from hqsweep.nn.core.guards import outside_autocast
from hqsweep.nn.dot_product_attention import AttentionCall, is_high_precision, quantized_attention
from hqsweep.nn.dot_product_attention import DotProductAttention as _DotProductAttention
from hqsweep.parallel.shared.attention import share_attention

TOKENS = {"sbhd": 0, "bshd": 1}
"""Format of queries, keys and values -> the axis of positions."""


class DotProductAttention(TakesKeys, _DotProductAttention):
    """softmax(q k^T * scale + bias) v of q [S, B, H, E] ("sbhd"), [B, S, H, E] ("bshd") or [tokens, H, E] ("thd"),
    with the heads of the output joined: [S, B, H * Ev], and so on.

    num_gqa_groups: the heads of k and v, which groups of queries share. kv_channels: E, or (E, Ev). softmax_type:
    "off-by-one" has a 1 more in each sum, "learnable" exp(softmax_offset) of each head. attention_dropout is drawn from
    torch's generator, in training. return_max_logit: a call returns also the largest score of each head, [H].

    Under a recipe that quantizes "dpa" there are as many queries as keys, Ev = E, and neither dropout nor
    pre_scale_bias. UserError there, for masks that are missing, and for an unsupported option that would change a
    number.
    """

    has_extra_state = False

    def __init__(self, num_attention_heads: int, kv_channels: int | Sequence[int], *positional: Any, **arguments: Any):
        given = DOT_PRODUCT_ATTENTION.given(positional, arguments)
        super().__init__(name=given["name"] or "dpa", recipe=high_precision())
        self._take(num_attention_heads, kv_channels, given)
        self._share_heads(given["tp_group"])

    def _take(self, heads: int, channels: int | Sequence[int], given: dict[str, Any]) -> None:
        kind, ranks = "DotProductAttention", ranks_of(given["tp_size"], given["tp_group"])
        groups = heads if given["num_gqa_groups"] is None else given["num_gqa_groups"]
        if heads % groups:
            raise UserError(f"{kind}: num_attention_heads={heads} does not divide by num_gqa_groups={groups}")
        if heads % ranks or groups % ranks:
            what = f"num_attention_heads={heads}" if heads % ranks else f"num_gqa_groups={groups}"
            raise UserError(f"{kind}: {what} does not divide by tp_size={ranks}")
        width = channels if isinstance(channels, int) else channels[0]
        self.ranks = ranks
        self.scale = 1 / math.sqrt(width) if given["softmax_scale"] is None else given["softmax_scale"]
        self.attention_dropout, self.qkv_format = given["attention_dropout"], given["qkv_format"]
        self.hidden = Hidden(
            mask_type=given["attn_mask_type"], window=given["window_size"], bottom_right=given["bottom_right_diagonal"]
        )
        self.softmax_type, self.return_max_logit = given["softmax_type"], bool(given["return_max_logit"])
        learned = torch.zeros(1, heads // ranks, 1, 1) if self.softmax_type == "learnable" else None
        self.softmax_offset = None if learned is None else nn.Parameter(learned)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the heads."""
        self._share_heads(tp_group)

    def _share_heads(self, group: ProcessGroup | None) -> None:
        share_attention(self, heads=group if self.ranks > 1 else None)

    def forward(self, *positional: Any, **arguments: Any) -> Any:
        """forward(query_layer, key_layer, value_layer, attention_mask, ...), by TransformerEngine's arguments.

        qkv_layer, kv_layer: q, k and v, or k and v, in one tensor, one beside the other along qkv_interleave_dim. With
        thd, cu_seqlens say where sequences begin; max_seqlen_* have no effect.
        """
        given = OF_DOT_PRODUCT_CALL.given(positional, arguments)
        form = given["qkv_format"] or self.qkv_format
        q, k, v = (activations(self.name, x) for x in _unpacked(given))
        hidden = replace(self.hidden, mask=given["attention_mask"])
        asked = {"mask_type": "attn_mask_type", "window": "window_size", "bottom_right": "bottom_right_diagonal"}
        hidden = replace(hidden, **{n: given[a] for n, a in asked.items() if given[a] is not None})
        bias = Bias(kind=given["core_attention_bias_type"], values=given["core_attention_bias"])
        bias = replace(bias, slopes=given["alibi_slopes"])
        if form == "thd":
            return self._of_sequences((q, k, v), hidden, bias, given)
        if "padding" in hidden.mask_type and hidden.mask is None and given["cu_seqlens_q"] is not None:
            ends = zip((given["cu_seqlens_q"], given["cu_seqlens_kv"]), (q, k), strict=True)
            hidden = replace(hidden, mask=tuple(paddings(e, x.shape[TOKENS[form]]) for e, x in ends))
        heads = [x.transpose(0, 1) if form == "sbhd" else x for x in (q, k, v)]
        heads = [x.transpose(1, 2) for x in heads]
        attend = partial(self.attend, hidden=hidden, bias=bias)
        y = checkpoint(attend, *heads) if given["checkpoint_core_attention"] else attend(*heads)
        y = y.transpose(1, 2).flatten(2)
        y = y.transpose(0, 1) if form == "sbhd" else y
        return (y, self._max_logit(heads[0], heads[1], hidden, bias)) if self.return_max_logit else y

    @outside_autocast
    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Hidden, bias: Bias) -> Tensor:
        """Attention [B, H, Tq, Ev] of q [B, H, Tq, E], and k [B, G, Tk, E] and v [B, G, Tk, Ev] of G groups."""
        quantizers = self.active_quantizers()
        if not is_high_precision(quantizers):
            return self._quantized(q, k, v, hidden, bias)
        self.dtype = q.dtype
        if not (q.is_cuda or q.dtype is torch.float32):  # CPUs have no fast attention in other dtypes
            y = self.attend(q.float(), k.float(), v.float(), hidden, bias)
            return y.to(q.dtype)
        if self._is_plain_call(q, k, hidden, bias) and self.scale == 1 / math.sqrt(q.shape[-1]):
            k, v = self._repeated(q, k, v)
            return super().forward(q, k, v, is_causal=hidden.causal)
        call = AttentionCall(**self.call_facts() | {"causal": False})
        y = self._in_high_precision(q, k, v, hidden, bias)
        return y if quantizers.output is None else call.rounded("output", y)

    def _is_plain_call(self, q: Tensor, k: Tensor, hidden: Hidden, bias: Bias) -> bool:
        """Whether hqsweep.nn's attention has all that a call needs."""
        alike = hidden.is_plain and bias.kind == "no_bias" and (q.shape[-2] == k.shape[-2] or not hidden.causal)
        return alike and self.softmax_type == "vanilla" and not self.drops

    @property
    def drops(self) -> bool:
        """Whether calls drop entries of the softmax."""
        return self.training and self.attention_dropout > 0

    def _in_high_precision(self, q: Tensor, k: Tensor, v: Tensor, hidden: Hidden, bias: Bias) -> Tensor:
        shape = (*q.shape[:3], k.shape[-2])
        k, v = self._repeated(q, k, v)
        added = hidden.scores(bias, shape, self.scale, q.device)
        if self.softmax_type != "vanilla":  # a key more, whose value is 0 and whose score is the sink's
            sink = self._sinks(q).view(1, -1, 1, 1).expand(*shape[:3], 1)
            added = torch.zeros(shape, device=q.device) if added is None else added.expand(shape)
            added, k, v = torch.cat([added, sink], dim=-1), *(F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        options = {"scale": self.scale, "dropout_p": self.attention_dropout if self.drops else 0.0}
        mask = None if added is None else added.to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        if self.softmax_type == "vanilla" and added is not None:  # a row that attends to nothing is zero
            y = y.masked_fill((added == -math.inf).all(-1, keepdim=True).expand(*y.shape[:-1], 1), 0.0)
        return y

    def _quantized(self, q: Tensor, k: Tensor, v: Tensor, hidden: Hidden, bias: Bias) -> Tensor:
        if self.drops or q.shape[-2] != k.shape[-2] or q.shape[-1] != v.shape[-1] or bias.kind == "pre_scale_bias":
            raise UserError(
                f"{self.name}: quantized attention takes as many queries as keys, values as wide as keys, and neither"
                " dropout nor pre_scale_bias; give the recipe high precision for dpa"
            )
        self.dtype = q.dtype
        facts = self.call_facts() | {"causal": hidden.is_plain and hidden.causal}
        call = self.parallel.call(facts, len(q)) if self.parallel is not None else AttentionCall(**facts)
        mask = None
        if not hidden.is_plain or bias.kind != "no_bias":
            shape = (*q.shape[:3], k.shape[-2])
            mask = hidden.scores(bias, shape, self.scale, q.device)
            mask = (mask > -math.inf) if bias.kind == "no_bias" else mask
            mask = mask.expand(len(q), -1, -1, -1)
        k, v = self._repeated(q, k, v)
        sinks = None if self.softmax_type == "vanilla" else self._sinks(q)
        y = quantized_attention(q, k, v, replace(call, scale=self.scale), mask=mask, sinks=sinks)
        return y if call.quantizers.output is None else call.rounded("output", y)

    def _repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each head, which heads of a group share."""
        if q.shape[1] == k.shape[1]:
            return k, v
        return tuple(x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))

    def _sinks(self, q: Tensor) -> Tensor:
        """The score of each head's sink, float32 [H]."""
        if self.softmax_offset is None:
            return torch.zeros(q.shape[1], device=q.device)
        return self.softmax_offset.float().flatten()

    def _max_logit(self, q: Tensor, k: Tensor, hidden: Hidden, bias: Bias) -> Tensor:
        k, _ = self._repeated(q, k, k)
        with torch.no_grad():
            scores = (q @ k.mT).float() * self.scale
            added = hidden.scores(bias, scores.shape, self.scale, q.device)
            return (scores if added is None else scores + added).amax(dim=(0, 2, 3)).to(q.dtype)

    def _of_sequences(self, heads: Sequence[Tensor], hidden: Hidden, bias: Bias, given: dict[str, Any]) -> Tensor:
        """Attention of sequences that lie one after the other, [tokens, H * Ev]; zero between them."""
        ends_q, ends_k = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        if ends_q is None or self.return_max_logit:
            raise UserError(
                f"{self.name}: qkv_format='thd' takes cu_seqlens_q and cu_seqlens_kv, and no return_max_logit"
            )
        ends_k = ends_q if ends_k is None else ends_k
        starts = [given["cu_seqlens_q_padded"], given["cu_seqlens_kv_padded"]]
        spans = [_spans(e, e if s is None else s) for e, s in zip((ends_q, ends_k), starts, strict=True)]
        hidden = replace(hidden, mask_type=hidden.mask_type.replace("padding_", "").replace("padding", "no_mask"))
        q, k, v = heads
        parts, at = [], 0
        for (a, b), (c, d) in zip(*spans, strict=True):
            own = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
            y = self.attend(*own, hidden, bias).transpose(1, 2)[0].flatten(1)
            parts += [y.new_zeros(a - at, y.shape[1]), y]
            at = b
        return torch.cat([*parts, parts[-1].new_zeros(len(q) - at, parts[-1].shape[1])])


def _spans(ends: Tensor, starts: Tensor) -> list[tuple[int, int]]:
    """(first, end) of each sequence, whose lengths are the steps of `ends`."""
    firsts, sizes = starts[:-1].tolist(), ends.diff().tolist()
    return [(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


def _unpacked(given: dict[str, Any]) -> Sequence[Tensor]:
    """q, k and v of a call. UserError where they are missing."""
    axis = given["qkv_interleave_dim"]
    if given["qkv_layer"] is not None:
        return given["qkv_layer"].unbind(axis)
    if given["kv_layer"] is not None:
        return given["query_layer"], *given["kv_layer"].unbind(axis)
    found = [given[f"{name}_layer"] for name in ("query", "key", "value")]
    if any(x is None for x in found):
        raise UserError("DotProductAttention: a call takes query_layer, key_layer and value_layer")
    return found
