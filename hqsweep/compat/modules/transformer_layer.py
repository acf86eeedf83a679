"""transformer_engine.pytorch.TransformerLayer, by its name: attention and an MLP of compat on a residual stream."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.compat.modules.layernorm_mlp import LayerNormMLP
from hqsweep.compat.modules.multihead_attention import AttentionCall, MultiheadAttention
from hqsweep.compat.modules.norms import LayerNorm, RMSNorm
from hqsweep.compat.modules.over_ranks import SHARED, OverRanks
from hqsweep.compat.signatures import OF_ATTENTION_CALL, OF_LAYER_CALL, TRANSFORMER_LAYER
from hqsweep.nn.core.residual import Branch
from hqsweep.nn.transformer import TransformerLayer as _TransformerLayer

OF_BOTH = (
    "init_method", "output_layer_init_method", "set_parallel_mode", "normalization", "zero_centered_gamma", *SHARED
)  # fmt: skip
"""The arguments for attention and MLP."""
OF_HEADS = (
    "num_gqa_groups", "kv_channels", "fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved",
    "attention_dropout", "layernorm_epsilon", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope", "softmax_type",
)  # fmt: skip
"""The arguments only for attention."""
OF_SELF = {
    "attention_mask": "attention_mask", "attn_mask_type": "self_attn_mask_type", "window_size": "window_size",
    "bottom_right_diagonal": "bottom_right_diagonal",
}  # fmt: skip
OF_CROSS = {
    "attention_mask": "enc_dec_attn_mask", "attn_mask_type": "enc_dec_attn_mask_type",
    "window_size": "enc_dec_window_size", "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
    "encoder_output": "encoder_output",
}  # fmt: skip
"""Argument of MultiheadAttention's call -> the layer's argument for it."""


class TransformerLayer(OverRanks, _TransformerLayer):
    """x + self_attention(x), then x + mlp(x), each of which begins with a norm, in high precision outside of autocast.

    layer_type="decoder" has attention to encoder_output between both. Arguments are as in MultiheadAttention and
    LayerNormMLP, with attn_input_format for qkv_format and self_attn_mask_type for attn_mask_type. hidden_dropout and
    drop_path_rate act on each branch, in training. parallel_attention_mlp: both read x. output_layernorm: the norm of
    attention is at the layer's end. apply_residual_connection_post_layernorm: a branch is added to its norm. UserError
    for an unsupported option that would change a number.
    """

    KEYS: ClassVar[Mapping[str, str]] = {"self_attention.": "attn.", "layernorm_mlp.": "mlp."}
    has_extra_state = False

    @TRANSFORMER_LAYER.builds
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, *positional: Any, **arguments: Any
    ) -> None:
        nn.Module.__init__(self)
        given = TRANSFORMER_LAYER.given(positional, arguments)
        name, epsilon = given["name"] or "layer", given["layernorm_epsilon"]
        self.hidden_dropout, self.drop_path_rate = given["hidden_dropout"], given["drop_path_rate"]
        self.parallel_attention_mlp = bool(given["parallel_attention_mlp"])
        self.from_norm, at_end = bool(given["apply_residual_connection_post_layernorm"]), given["output_layernorm"]
        both = {n: given[n] for n in OF_BOTH}
        heads = both | {n: given[n] for n in OF_HEADS} | {"qkv_format": given["attn_input_format"]}
        own = {a: given[n] for a, n in OF_SELF.items() if n in given}
        returns = {"return_layernorm_output": self.from_norm}
        sizes = hidden_size, num_attention_heads
        self.attn = MultiheadAttention(
            *sizes,
            name=f"{name}.self_attention",
            input_layernorm=not at_end,
            return_layernorm_output=self.from_norm and not at_end,
            **own,
            **heads,
        )
        self.inter_attention = None
        if given["layer_type"] == "decoder":
            own = {a: given[n] for a, n in OF_CROSS.items() if n in given}
            cross = {"input_layernorm": True, "attention_type": "cross", "name": f"{name}.inter_attention"}
            self.inter_attention = MultiheadAttention(*sizes, **cross, **own, **heads, **returns)
        inner = {"eps": epsilon, "activation": given["activation"], "activation_params": given["activation_params"]}
        self.mlp = LayerNormMLP(hidden_size, ffn_hidden_size, name=f"{name}.layernorm_mlp", **inner, **both, **returns)
        norm = LayerNorm if given["normalization"] == "LayerNorm" else RMSNorm
        options = {"eps": epsilon, "params_dtype": given["params_dtype"]}
        options |= {"zero_centered_gamma": given["zero_centered_gamma"]}
        self.layernorm = norm(hidden_size, **options) if at_end else None

    @property
    def self_attn_mask_type(self) -> str:
        """The mask of calls that name none."""
        return self.attn.attn_mask_type

    @property
    def is_simple(self) -> bool:
        """Whether hqsweep.nn's TransformerLayer has all that the layer needs."""
        drops = self.training and (self.hidden_dropout > 0 or self.drop_path_rate > 0)
        other = self.inter_attention is not None or self.layernorm is not None
        return self.attn.is_simple and not (drops or other or self.parallel_attention_mlp or self.from_norm)

    def forward(self, hidden_states: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(hidden_states, attention_mask, ...). is_first_microbatch has no effect."""
        calls = AttentionCall(), AttentionCall()
        if positional or arguments:
            given = OF_LAYER_CALL.given(positional, arguments)
            calls = _call(given, OF_SELF), _call(given, OF_CROSS)
        own = calls[0]
        if self.is_simple and not set(own.core) - {"checkpoint_core_attention"} and own.rotary_pos_emb is None:
            return super().forward(hidden_states, own.checkpoints)
        return self._general(self.take(hidden_states), *calls)

    def _general(self, x: Tensor, own: AttentionCall, cross: AttentionCall) -> Tensor:
        y, *normed = _tuple(self.attn.attended(x, own))
        if self.parallel_attention_mlp:
            z, *normed = _tuple(self.mlp(x))
            x = self._added_to(normed[0] if normed else x, y + z)
        else:
            x = self._added_to(normed[0] if normed else x, y)
            if self.inter_attention is not None:
                y, *normed = _tuple(self.inter_attention.attended(x, cross))
                x = self._added_to(normed[0] if normed else x, y)
            y, *normed = _tuple(self.mlp(x))
            x = self._added_to(normed[0] if normed else x, y)
        return x if self.layernorm is None else self.layernorm(x)

    def _added_to(self, x: Tensor, branch: Tensor) -> Tensor:
        branch = F.dropout(branch, self.hidden_dropout, self.training)
        if self.training and self.drop_path_rate > 0:
            kept = 1 - self.drop_path_rate
            branch = branch / kept * (torch.rand(len(branch), device=x.device) < kept).view(-1, *[1] * (x.dim() - 1))
        return x + branch.to(x.dtype)

    def _residual(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool) -> tuple[Tensor, Branch]:
        return super()._residual(self.take(x), branch, checkpoint_core_attention)


def _call(given: Mapping[str, Any], names: Mapping[str, str]) -> AttentionCall:
    """The call of one attention from the layer's arguments."""
    shared = {n: v for n, v in given.items() if n in OF_ATTENTION_CALL.defaults and n not in OF_CROSS}
    own = OF_ATTENTION_CALL.defaults | shared | {argument: given[name] for argument, name in names.items()}
    if names is OF_SELF:
        own |= {"cu_seqlens_kv": own["cu_seqlens_q"], "cu_seqlens_kv_padded": own["cu_seqlens_q_padded"]}
    return AttentionCall.of(own)


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
