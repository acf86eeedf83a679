"""transformer_engine.pytorch's LayerNormMLP, MultiheadAttention and TransformerLayer, built from this package's
modules.

Their linears are compat's own, named fc1, fc2, qkv and proj. Tensor parallelism of these linears is here, too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.activation_dtype import InActivationDtype, activations
from hqsweep.compat.arguments import (
    LAYERNORM_MLP,
    MULTIHEAD_ATTENTION,
    OF_ATTENTION_CALL,
    OF_LAYER_CALL,
    OF_MLP_CALL,
    TRANSFORMER_LAYER,
    shown,
)
from hqsweep.compat.checkpoint_keys import EXTRA_STATE, TakesKeys, drop_extra_state
from hqsweep.compat.linear import LayerNormLinear, Linear, ranks_of
from hqsweep.errors import UserError
from hqsweep.nn.attention.attention import DotProductAttention
from hqsweep.nn.attention.multihead_attention import MultiheadAttention as _MultiheadAttention
from hqsweep.nn.core.context import high_precision, recomputed
from hqsweep.nn.core.residual import Branch, add_branch
from hqsweep.nn.layers.transformer_layer import TransformerLayer as _TransformerLayer
from hqsweep.nn.linear.mlp import LayerNormMLP as _LayerNormMLP
from hqsweep.nn.linear.mlp import activate, joins
from hqsweep.ops.model.activation import INPUTS
from hqsweep.ops.quantize.kernels import in_dtype
from hqsweep.parallel.shared.attention import share_attention

SHARED = (
    "tp_group", "tp_size", "sequence_parallel", "fuse_wgrad_accumulation", "params_dtype", "bias",
)  # fmt: skip
"""The arguments that a module hands on to its linears."""
OF_BOTH = ("init_method", "output_layer_init_method", "set_parallel_mode", "normalization", *SHARED)
OF_HEADS = ("num_gqa_groups", "kv_channels", "fuse_qkv_params", "qkv_weight_interleaved")
"""The arguments that a layer passes only to attention, beside the arguments for attention and MLP."""
MASKS = {"causal": True, "no_mask": False}


class _Gated(LayerNormLinear):
    """The first linear of a SwiGLU, whose weight has the gate above the rest."""

    pieces = 2


class _NormedQkv(LayerNormLinear):
    pieces = 3


class _Qkv(Linear):
    pieces = 3


class _OverRanks(TakesKeys):
    """A module of several linears that ranks may share. Each call is in the dtype of its input."""

    def take(self, x: Tensor) -> Tensor:
        """Return x in the dtype of a call with it, and give all modules inside that dtype."""
        x = activations(type(self).__name__, x)
        self.set_dtype(x.dtype)
        return x

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of the calls that follow."""
        for child in self.children():
            if isinstance(child, InActivationDtype | _OverRanks):
                child.set_dtype(dtype)

    def _check_ranks(self, arguments: dict[str, Any]) -> None:
        """UserError for ranks that no argument says how to use."""
        kind = type(self).__name__
        self.ranks = ranks_of(arguments["tp_size"], arguments["tp_group"])
        if self.ranks > 1 and not arguments["set_parallel_mode"]:
            raise UserError(f"{kind}: tp_size={self.ranks} without set_parallel_mode; give set_parallel_mode=True")

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the module. UserError for another number of ranks than tp_size."""
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)


class LayerNormMLP(_OverRanks, _LayerNormMLP):
    """fc2(activation(fc1(norm(x)))), in high precision outside of autocast.

    With set_parallel_mode the ranks of tp_group have an equal number of inner features each, as in Linear: fc1 by
    column and fc2 by row. activation: "gelu" or "swiglu". init_method draws the weight of fc1, and
    output_layer_init_method the weight of fc2, whole on every rank. UserError for an unsupported option that would
    change a number.
    """

    KEYS: ClassVar[Mapping[str, str]] = {
        "layer_norm_weight": "fc1.layer_norm_weight", "layer_norm_bias": "fc1.layer_norm_bias",
        "fc1_weight": "fc1.weight", "fc1_bias": "fc1.bias", "fc2_weight": "fc2.weight", "fc2_bias": "fc2.bias",
    }  # fmt: skip

    def __init__(self, hidden_size: int, ffn_hidden_size: int, *positional: Any, **arguments: Any) -> None:
        nn.Module.__init__(self)
        given = LAYERNORM_MLP.given(positional, arguments)
        self.activation, name, shared = given["activation"], given["name"] or "layernorm_mlp", _shared(given)
        self._check_ranks(given)
        first, inner = (_Gated if INPUTS[self.activation] == 2 else LayerNormLinear), INPUTS[self.activation]
        modes = {"init_method": given["init_method"], "parallel_mode": "column"}
        norm = {"normalization": given["normalization"], "eps": given["eps"]}
        self.fc1 = first(hidden_size, inner * ffn_hidden_size, name=f"{name}.fc1", **modes, **norm, **shared)
        modes = {"init_method": given["output_layer_init_method"], "parallel_mode": "row"}
        self.fc2 = Linear(ffn_hidden_size, hidden_size, name=f"{name}.fc2", **modes, **shared)

    def reset_parameters(self) -> None:
        """Draw both weights again, and reset the biases and the norm."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, inp: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(inp). is_first_microbatch has no effect: quantization(cache_weights=True) keeps the operands of
        unchanged weights."""
        if positional or arguments:
            OF_MLP_CALL.given(positional, arguments)
        return super().forward(inp)

    def _added(self, x: Tensor, branch: Branch) -> tuple[Tensor, Branch]:
        x = self.take(x)
        if joins(self.fc1, self.fc2, self.activation, x):
            return super()._added(x, branch)
        total, z = self.fc1.added(x, branch)
        return total, self.fc2(in_dtype(activate(z, self.activation), x.dtype))

    def give_keys(self, state: dict[str, Any], prefix: str) -> None:
        """TakesKeys.give_keys. In TransformerEngine its linears have no separate _extra_state."""
        for inner in ("fc1", "fc2"):
            state.pop(f"{prefix}{inner}.{EXTRA_STATE}")
        super().give_keys(state, prefix)


class MultiheadAttention(_OverRanks, _MultiheadAttention):
    """Self-attention of x [S, B, D] ("sbhd") or [B, S, D] ("bshd"), in high precision outside of autocast.

    With set_parallel_mode the ranks of tp_group have an equal number of heads each, as in Linear: qkv by column and
    proj by row. attn_mask_type: "causal" or "no_mask". q, k and v lie one below the other in the weight of qkv, which
    init_method draws; output_layer_init_method draws the weight of proj. UserError for an unsupported option that would
    change a number; dropout, for example, must be given as 0.
    """

    KEYS: ClassVar[Mapping[str, str]] = {"layernorm_qkv.": "qkv."}
    has_extra_state = False

    def __init__(self, hidden_size: int, num_attention_heads: int, *positional: Any, **arguments: Any) -> None:
        nn.Module.__init__(self)
        kind, heads, given = "MultiheadAttention", num_attention_heads, MULTIHEAD_ATTENTION.given(positional, arguments)
        self.attn_mask_type, self._first_is_tokens = given["attn_mask_type"], given["qkv_format"] == "sbhd"
        _check_heads(kind, hidden_size, heads, given)
        self._check_ranks(given)
        if heads % self.ranks:
            raise UserError(f"{kind}: num_attention_heads={heads} does not divide by tp_size={self.ranks}")
        if not self._first_is_tokens and given["sequence_parallel"] and self.ranks > 1:
            raise UserError(f"{kind}: sequence_parallel splits tokens along the first axis; give qkv_format='sbhd'")
        name, shared, self.input_layernorm = given["name"] or "attn", _shared(given), bool(given["input_layernorm"])
        self.heads, self.rope_base, self.is_causal = heads // self.ranks, None, MASKS[self.attn_mask_type]
        self.quantize_boundaries = False
        norm = {"normalization": given["normalization"], "eps": given["layernorm_epsilon"]}
        first, norm = (_NormedQkv, norm) if self.input_layernorm else (_Qkv, {})
        modes = {"init_method": given["init_method"], "parallel_mode": "column"}
        self.qkv = first(hidden_size, 3 * hidden_size, name=f"{name}.qkv", **modes, **norm, **shared)
        self.dpa = DotProductAttention(name=f"{name}.dpa", recipe=high_precision())
        modes = {"init_method": given["output_layer_init_method"], "parallel_mode": "row"}
        self.proj = Linear(hidden_size, hidden_size, name=f"{name}.proj", **modes, **shared)
        self.qkv.fused_qkv = bool(given["fuse_qkv_params"])
        if not self.input_layernorm:
            self.KEYS = {}
        self._share_heads(given["tp_group"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """UserError for a weight of q, k and v in one piece, whose rows TransformerEngine has by heads."""
        theirs = f"{prefix}qkv.{EXTRA_STATE}" in state_dict and f"{prefix}qkv.weight" in state_dict
        fused = theirs or f"{prefix}layernorm_qkv.weight" in state_dict
        if fused and not self.qkv.fused_qkv:
            raise UserError(
                f"MultiheadAttention: the checkpoint has the weight of q, k and v in one piece, {prefix}*.weight, whose"
                " rows may lie by heads; build the module with fuse_qkv_params=True and qkv_weight_interleaved=False if"
                " the checkpoint's was, or save it there without fuse_qkv_params"
            )
        for inner in ("core_attention.", "core_attention.fused_attention."):
            drop_extra_state(state_dict, f"{prefix}{inner}", "MultiheadAttention")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the module. UserError for another number of ranks than tp_size."""
        super().set_tensor_parallel_group(tp_group)
        self._share_heads(tp_group)

    def _share_heads(self, group: ProcessGroup | None) -> None:
        share_attention(self.dpa, heads=group if self.ranks > 1 else None)

    def forward(self, hidden_states: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(hidden_states), with checkpoint_core_attention as in hqsweep.nn. is_first_microbatch has no effect.
        UserError for a mask, for another attn_mask_type than the module's, and for an unsupported argument."""
        given = OF_ATTENTION_CALL.given(positional, arguments) if positional or arguments else {}
        _same_mask("MultiheadAttention", "attn_mask_type", given.get("attn_mask_type"), self.attn_mask_type)
        return super().forward(hidden_states, bool(given.get("checkpoint_core_attention")))

    def _added(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool = False) -> tuple[Tensor, Branch]:
        x = self.take(x)
        if self.input_layernorm:
            return super()._added(x, branch, checkpoint_core_attention)
        x = add_branch(x, branch)
        qkv = self.qkv(x)
        return x, self.proj(recomputed(self._core, qkv) if checkpoint_core_attention else self._core(qkv))

    def _core(self, qkv: Tensor, *, in_place: bool = False) -> Tensor:
        dtype = qkv.dtype  # on a CPU attention is in float32
        if self.dpa.dtype is not dtype:
            self.dpa.dtype = dtype
        if not self._first_is_tokens:
            return in_dtype(super()._core(qkv, in_place=in_place), dtype)
        y = super()._core(qkv.transpose(0, 1).contiguous(), in_place=in_place)
        return in_dtype(y, dtype).transpose(0, 1)


class TransformerLayer(_OverRanks, _TransformerLayer):
    """x + self_attention(x), then x + mlp(x), each of which begins with a norm, in high precision outside of autocast.

    Arguments are as in MultiheadAttention and LayerNormMLP, with attn_input_format for qkv_format and
    self_attn_mask_type for attn_mask_type. UserError for an unsupported option that would change a number; dropout, for
    example, must be given as 0.
    """

    KEYS: ClassVar[Mapping[str, str]] = {"self_attention.": "attn.", "layernorm_mlp.": "mlp."}
    has_extra_state = False

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, *positional: Any, **arguments: Any
    ) -> None:
        nn.Module.__init__(self)
        given = TRANSFORMER_LAYER.given(positional, arguments)
        self.self_attn_mask_type, name = given["self_attn_mask_type"], given["name"] or "layer"
        heads, both = {n: given[n] for n in OF_HEADS}, {n: given[n] for n in OF_BOTH}
        self.attn = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attention_dropout=0.0,
            layernorm_epsilon=given["layernorm_epsilon"],
            attn_mask_type=self.self_attn_mask_type,
            qkv_format=given["attn_input_format"],
            input_layernorm=True,
            name=f"{name}.attn",
            **heads,
            **both,
        )
        inner = {"eps": given["layernorm_epsilon"], "activation": given["activation"], "name": f"{name}.mlp"}
        self.mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **inner, **both)

    def forward(self, hidden_states: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        """forward(hidden_states), with checkpoint_core_attention as in hqsweep.nn. is_first_microbatch has no effect.
        UserError for a mask, for another self_attn_mask_type than the layer's, and for an unsupported argument."""
        given = OF_LAYER_CALL.given(positional, arguments) if positional or arguments else {}
        kind, name = "TransformerLayer", "self_attn_mask_type"
        _same_mask(kind, name, given.get(name), self.self_attn_mask_type)
        return super().forward(hidden_states, bool(given.get("checkpoint_core_attention")))

    def _residual(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool) -> tuple[Tensor, Branch]:
        return super()._residual(self.take(x), branch, checkpoint_core_attention)


def _shared(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that linears take."""
    return {n: given[n] for n in SHARED}


def _same_mask(kind: str, argument: str, asked: Any, own: str) -> None:
    """UserError for a call with another mask than that which the module is built with."""
    if asked is not None and not (isinstance(asked, str) and asked == own):
        raise UserError(f"{kind}: {argument} is {shown(asked)} in a call; build the module with it, which has {own!r}")


def _check_heads(kind: str, width: int, heads: int, arguments: dict[str, Any]) -> None:
    """Raise UserError for arguments with another layout of q, k and v."""
    groups, channels = arguments["num_gqa_groups"], arguments["kv_channels"]
    fused, interleaved = arguments["fuse_qkv_params"], arguments["qkv_weight_interleaved"]
    if width % heads:
        raise UserError(f"{kind}: hidden_size={width} does not divide by num_attention_heads={heads}")
    if groups not in (None, heads):
        raise UserError(f"{kind}: num_gqa_groups={groups} has no counterpart here; every head has keys of its own")
    if channels not in (None, width // heads):
        raise UserError(f"{kind}: kv_channels={channels} has no counterpart here; heads are {width // heads} wide")
    if fused and interleaved:
        raise UserError(
            f"{kind}: q, k and v lie one below the other in the weight; give qkv_weight_interleaved=False with"
            " fuse_qkv_params"
        )
