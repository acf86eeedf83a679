"""transformer_engine.pytorch.MultiheadAttention, by its name: linears of compat, and DotProductAttention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hqsweep.compat.checkpoint_keys import EXTRA_STATE, drop_extra_state
from hqsweep.compat.modules.dot_product_attention import DotProductAttention
from hqsweep.compat.modules.linear import LayerNormLinear, Linear
from hqsweep.compat.modules.norms import qk_norm
from hqsweep.compat.modules.over_ranks import OverRanks, shared
from hqsweep.compat.modules.rope import rotated
from hqsweep.compat.signatures import MULTIHEAD_ATTENTION, OF_ATTENTION_CALL
from hqsweep.errors import UserError
from hqsweep.nn.core.context import recomputed
from hqsweep.nn.core.residual import Branch, add_branch
from hqsweep.nn.transformer import MultiheadAttention as _MultiheadAttention
from hqsweep.nn.transformer import attend_joined
from hqsweep.ops.quantize.kernels import in_dtype

OF_CORE = (
    "attention_mask", "attn_mask_type", "window_size", "bottom_right_diagonal", "checkpoint_core_attention",
    "core_attention_bias_type", "core_attention_bias", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_kv",
    "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs",
)  # fmt: skip
"""The arguments of a call that DotProductAttention takes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How heads lie in the rows of a projection."""

    heads: int
    groups: int
    width: int
    interleaved: bool
    """Whether q, k and v of each group lie together."""

    @property
    def parts(self) -> dict[str, int]:
        """Name of a part of the weight -> its rows, where parts lie one below the other."""
        rows = self.groups * self.width
        return {"query": self.heads * self.width, "key": rows, "value": rows}

    def of_self(self, y: Tensor) -> Sequence[Tensor]:
        """q, k and v [..., heads, width] of one projection."""
        if not self.interleaved:
            return [part.unflatten(-1, (-1, self.width)) for part in y.split(list(self.parts.values()), dim=-1)]
        each = self.heads // self.groups
        y = y.unflatten(-1, (self.groups, each + 2, self.width))
        q, k, v = y.split([each, 1, 1], dim=-2)
        return [part.flatten(-3, -2) for part in (q, k, v)]

    def of_cross(self, q: Tensor, kv: Tensor) -> Sequence[Tensor]:
        """q, k and v [..., heads, width] of a projection for q, and one for k and v."""
        shape = (self.groups, 2, self.width) if self.interleaved else (2, self.groups, self.width)
        k, v = kv.unflatten(-1, shape).unbind(-2 if self.interleaved else -3)
        return q.unflatten(-1, (self.heads, self.width)), k, v


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """The arguments of a call."""

    core: Mapping[str, Any] = field(default_factory=dict)
    """Those that DotProductAttention takes, if they are not their defaults."""
    encoder_output: Tensor | None = None
    rotary_pos_emb: Tensor | Sequence[Tensor] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "AttentionCall":
        """The arguments that OF_ATTENTION_CALL has taken."""
        plain = OF_ATTENTION_CALL.defaults
        core = {name: given[name] for name in OF_CORE if given[name] is not plain[name] and given[name] is not False}
        return cls(core=core, encoder_output=given["encoder_output"], rotary_pos_emb=given["rotary_pos_emb"])

    @property
    def checkpoints(self) -> bool:
        """Whether backward recomputes the attention."""
        return bool(self.core.get("checkpoint_core_attention"))


class MultiheadAttention(OverRanks, _MultiheadAttention):
    """Attention of x [S, B, D] ("sbhd"), [B, S, D] ("bshd") or [tokens, D] ("thd"), in high precision outside of
    autocast. attention_type="cross" reads keys and values from encoder_output.

    With set_parallel_mode the ranks of tp_group have an equal number of heads each, as in Linear: projections by column
    and proj by row. Without fuse_qkv_params q, k and v lie one below the other in the weight of qkv, as with
    qkv_weight_interleaved=False; else those of each group do. init_method draws the weight of qkv, and
    output_layer_init_method the weight of proj. Masks, windows, biases, GQA, softmax_type and dropout are
    DotProductAttention's. UserError for an unsupported option that would change a number.
    """

    has_extra_state = False

    @MULTIHEAD_ATTENTION.builds
    def __init__(self, hidden_size: int, num_attention_heads: int, *positional: Any, **arguments: Any) -> None:
        nn.Module.__init__(self)
        kind, heads, given = "MultiheadAttention", num_attention_heads, MULTIHEAD_ATTENTION.given(positional, arguments)
        self.check_ranks(given)
        layout = _layout(kind, hidden_size, heads, given)
        if heads % self.ranks:
            raise UserError(f"{kind}: num_attention_heads={heads} does not divide by tp_size={self.ranks}")
        self.qkv_format = given["qkv_format"]
        if self.qkv_format != "sbhd" and given["sequence_parallel"] and self.ranks > 1:
            raise UserError(f"{kind}: sequence_parallel splits tokens along the first axis; give qkv_format='sbhd'")
        own = replace(layout, heads=heads // self.ranks, groups=layout.groups // self.ranks)
        self.layout, self.heads, self.rope_base, self.quantize_boundaries = own, own.heads, None, False
        self.input_layernorm, self.attention_type = bool(given["input_layernorm"]), given["attention_type"]
        self.return_bias, self.return_norm = bool(given["return_bias"]), bool(given["return_layernorm_output"])
        self.rotary_pos_interleaved = bool(given["rotary_pos_interleaved"])
        name = given["name"] or "attn"
        self._build_projections(hidden_size, layout, name, given)
        options = {"tp_size": self.ranks, "tp_group": given["tp_group"], "num_gqa_groups": layout.groups}
        options |= {n: given[n] for n in ("attention_dropout", "attn_mask_type", "window_size", "softmax_type")}
        options |= {"bottom_right_diagonal": given["bottom_right_diagonal"], "qkv_format": self.qkv_format}
        self.dpa = DotProductAttention(heads, layout.width, name=f"{name}.core_attention", **options)
        modes = {"init_method": given["output_layer_init_method"], "parallel_mode": "row"}
        modes |= shared(given) | {"return_bias": self.return_bias}
        self.proj = Linear(heads * layout.width, hidden_size, name=f"{name}.proj", **modes)
        self.q_norm, self.k_norm = (qk_norm(layout.width, given) for _ in range(2))
        self.norm_before_rope = bool(given["qk_norm_before_rope"])

    def _build_projections(self, width: int, layout: Layout, name: str, given: Mapping[str, Any]) -> None:
        modes = {"init_method": given["init_method"], "parallel_mode": "column"} | shared(given)
        norm = {"normalization": given["normalization"], "eps": given["layernorm_epsilon"]}
        norm |= {n: given[n] for n in ("zero_centered_gamma", "return_layernorm_output")}
        first, norm = (LayerNormLinear, norm) if self.input_layernorm else (Linear, {})
        kind = f"{name}.layernorm_linear" if self.input_layernorm else f"{name}.linear"
        split = None if layout.interleaved else layout.parts
        if self.attention_type == "self":
            rows = sum(layout.parts.values())
            self.qkv = first(width, rows, name=f"{kind}_qkv", parameters_split=split, **modes, **norm)
            self.qkv.split = {} if given["fuse_qkv_params"] else self.qkv.split
            self.KEYS = {"layernorm_qkv.": "qkv."} if self.input_layernorm else {}
            self.KEYS |= {"core_attention.": "dpa."}
            return
        query, keys = layout.parts["query"], 2 * layout.parts["key"]
        own = None if split is None or not self.input_layernorm else {"query": query}
        made = first(width, query, name=f"{kind}_q", parameters_split=own, **modes, **norm)
        self.add_module("layernorm_query" if self.input_layernorm else "query_layer", made)
        split = split and {part: split[part] for part in ("key", "value")}
        self.key_value = Linear(width, keys, name=f"{name}.linear_kv", parameters_split=split, **modes)
        if given["fuse_qkv_params"]:
            made.split = self.key_value.split = {}
        self.KEYS = {"core_attention.": "dpa."}

    @property
    def is_causal(self) -> bool:
        """Whether later tokens are hidden."""
        return self.dpa.hidden.causal

    @property
    def attn_mask_type(self) -> str:
        """The mask of calls that name none."""
        return self.dpa.hidden.mask_type

    @property
    def is_simple(self) -> bool:
        """Whether hqsweep.nn's MultiheadAttention has all that the module needs."""
        simple = self.attention_type == "self" and not (self.return_norm or self.return_bias or self.layout.interleaved)
        plain = self.dpa.hidden.is_plain and self.dpa.softmax_type == "vanilla" and not self.dpa.drops
        alike = self.layout.heads == self.layout.groups and self.q_norm is None and self.qkv_format != "thd"
        return simple and plain and alike

    def forward(self, hidden_states: Tensor, *positional: Any, **arguments: Any) -> Any:
        """forward(hidden_states, attention_mask, encoder_output, ...): y, then with return_bias the bias of proj, and
        with return_layernorm_output the norm. is_first_microbatch has no effect."""
        call = AttentionCall()
        if positional or arguments:
            call = AttentionCall.of(OF_ATTENTION_CALL.given(positional, arguments))
        return self.attended(hidden_states, call)

    def attended(self, x: Tensor, call: AttentionCall) -> Any:
        """forward() of x with the arguments of a call."""
        if self.is_simple and not set(call.core) - {"checkpoint_core_attention"} and call.rotary_pos_emb is None:
            return super().forward(x, call.checkpoints)
        x = self.take(x)
        heads, normed = self._projected(x, call.encoder_output)
        y = self.proj(in_dtype(self._attention(heads, call), x.dtype))
        y = y if isinstance(y, tuple) else (y,)
        y = (*y, *normed) if self.return_norm else y
        return y if len(y) > 1 else y[0]

    def _projected(self, x: Tensor, encoder_output: Tensor | None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """q, k and v, and the norm of x if it is returned."""
        cross = self.attention_type == "cross"
        if cross and encoder_output is None:
            raise UserError("MultiheadAttention: attention_type='cross' takes encoder_output")
        first = self.qkv if not cross else self.layernorm_query if self.input_layernorm else self.query_layer
        y, *normed = first(x) if self.input_layernorm and self.return_norm else (first(x),)
        if not cross:
            return self.layout.of_self(y), normed
        return self.layout.of_cross(y, self.key_value(encoder_output.to(x.dtype))), normed

    def _attention(self, heads: Sequence[Tensor], call: AttentionCall) -> Tensor:
        q, k, v = heads
        if self.q_norm is not None and self.norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if call.rotary_pos_emb is not None:
            angles = call.rotary_pos_emb
            angles = angles if isinstance(angles, tuple) else (angles, angles)
            q, k = (self._rotated(x, own) for x, own in zip((q, k), angles, strict=True))
        if self.q_norm is not None and not self.norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.dpa(q, k, v, **call.core)

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.qkv_format == "thd":
            raise UserError("MultiheadAttention: rotary_pos_emb has no counterpart here with qkv_format='thd'")
        axes = (1, 2, 0) if self.qkv_format == "sbhd" else (0, 2, 1)  # of B, H and S
        y = rotated(x.permute(*axes, 3), angles, interleaved=self.rotary_pos_interleaved)
        return y.permute(2, 0, 1, 3) if self.qkv_format == "sbhd" else y.permute(0, 2, 1, 3)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """UserError for a weight of q, k and v in one piece, whose rows TransformerEngine has by heads."""
        theirs = f"{prefix}qkv.{EXTRA_STATE}" in state_dict and f"{prefix}qkv.weight" in state_dict
        fused = theirs or f"{prefix}layernorm_qkv.weight" in state_dict
        if fused and self.attention_type == "self" and self.qkv.split:
            raise UserError(
                f"MultiheadAttention: the checkpoint has the weight of q, k and v in one piece, {prefix}*.weight, whose"
                " rows may lie by heads; build the module with fuse_qkv_params=True and the checkpoint's"
                " qkv_weight_interleaved, or save it there without fuse_qkv_params"
            )
        for inner in ("core_attention.", "core_attention.fused_attention."):
            drop_extra_state(state_dict, f"{prefix}{inner}", "MultiheadAttention")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _added(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool = False) -> tuple[Tensor, Branch]:
        x = self.take(x)
        if self.input_layernorm:
            return super()._added(x, branch, checkpoint_core_attention)
        x = add_branch(x, branch)
        qkv = self.qkv(x)
        return x, self.proj(recomputed(self._core, qkv) if checkpoint_core_attention else self._core(qkv))

    def _core(self, qkv: Tensor, *, in_place: bool = False) -> Tensor:
        if self.dpa.splits_tokens:
            qkv = self.dpa.parallel.whole_sequences(qkv if self.qkv_format == "bshd" else qkv.transpose(0, 1))
            qkv = qkv if self.qkv_format == "bshd" else qkv.transpose(0, 1)
        elif in_place and self._is_joined(qkv):
            return attend_joined(qkv, self.heads, None, self.is_causal)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)  # ranks may have changed the number of heads
        return in_dtype(self.dpa(q, k, v), qkv.dtype)

    def _is_joined(self, qkv: Tensor) -> bool:
        return self.qkv_format == "bshd" and super()._is_joined(qkv)


def _layout(kind: str, width: int, heads: int, given: Mapping[str, Any]) -> Layout:
    """How heads lie in a projection. UserError for numbers that do not divide."""
    groups = given["num_gqa_groups"] or heads
    if width % heads and given["kv_channels"] is None:
        raise UserError(f"{kind}: hidden_size={width} does not divide by num_attention_heads={heads}")
    if heads % groups:
        raise UserError(f"{kind}: num_attention_heads={heads} does not divide by num_gqa_groups={groups}")
    interleaved = bool(given["fuse_qkv_params"] and given["qkv_weight_interleaved"])
    return Layout(heads=heads, groups=groups, width=given["kv_channels"] or width // heads, interleaved=interleaved)
