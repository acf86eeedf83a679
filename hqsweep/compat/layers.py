"""The LayerNormMLP, MultiheadAttention and TransformerLayer of transformer_engine.pytorch, by their names, on this
package's.

Their linears are compat's own, under the names fc1, fc2, qkv and proj; so is what tensor parallelism does with them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hqsweep.compat.arguments import SAYS_NOTHING, refuse
from hqsweep.compat.linear import LayerNormLinear, Linear
from hqsweep.compat.parts import ranks_of
from hqsweep.errors import UserError
from hqsweep.nn.activation import ACTIVATIONS
from hqsweep.nn.attention import DotProductAttention
from hqsweep.nn.context import HIGH_PRECISION
from hqsweep.nn.layernorm_mlp import LayerNormMLP as _LayerNormMLP
from hqsweep.nn.multihead_attention import MultiheadAttention as _MultiheadAttention
from hqsweep.nn.recompute import recomputed
from hqsweep.nn.residual import Branch, add_branch
from hqsweep.nn.transformer_layer import TransformerLayer as _TransformerLayer
from hqsweep.ops.activation import INPUTS

SHARED = (
    "tp_group", "tp_size", "sequence_parallel", "fuse_wgrad_accumulation", "params_dtype", "bias", "normalization",
)  # fmt: skip
"""The arguments that a module hands on to its linears."""
OF_BOTH = ("init_method", "output_layer_init_method", "set_parallel_mode", *SHARED)
OF_HEADS = ("num_gqa_groups", "kv_channels", "fuse_qkv_params", "qkv_weight_interleaved")
"""The arguments that a layer hands on to attention alone, beside those that it hands on to attention and MLP."""
OVERLAPS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad")
"""Arguments without an effect: they need ub_tp_comm_overlap, which is refused."""
HINTS = ("layer_number", "seq_length", "micro_batch_size", *OVERLAPS, *SAYS_NOTHING)
MASKS = {"causal": True, "no_mask": False}
FORMATS = ("sbhd", "bshd")
Init = Callable[[Tensor], Any] | None


class _Gated(LayerNormLinear):
    """The first linear of a SwiGLU, whose weight has the gate above the rest."""

    pieces = 2


class _NormedQkv(LayerNormLinear):
    pieces = 3


class _Qkv(Linear):
    pieces = 3


class _OverRanks(nn.Module):
    """A module of several linears that ranks may share."""

    def _check_ranks(self, arguments: dict[str, Any], set_parallel_mode: bool) -> None:
        """UserError for ranks that no argument says how to use."""
        kind = type(self).__name__
        self.ranks = ranks_of(kind, arguments.get("tp_size", 1), arguments.get("tp_group"))
        if self.ranks > 1 and not set_parallel_mode:
            raise UserError(f"{kind}: tp_size={self.ranks} without set_parallel_mode; give set_parallel_mode=True")

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the module. UserError for another number of them than tp_size."""
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)


class LayerNormMLP(_OverRanks, _LayerNormMLP):
    """fc2(activation(fc1(norm(x)))), in high precision outside of autocast.

    With set_parallel_mode the ranks of tp_group have an equal number of inner features each, as Linear does it: fc1 by
    column and fc2 by row. activation: "gelu" or "swiglu". init_method draws the weight of fc1, output_layer_init_method
    that of fc2, whole on every rank. UserError for an option that would change a number and is not supported.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        activation: str = "gelu",
        init_method: Init = None,
        output_layer_init_method: Init = None,
        set_parallel_mode: bool = False,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        if activation not in ACTIVATIONS:
            raise UserError(f"LayerNormMLP: activation is {activation!r}; it takes {' or '.join(ACTIVATIONS)}")
        name, shared = name or "layernorm_mlp", _shared("LayerNormMLP", arguments, (*HINTS, "checkpoint"))
        self._check_ranks(shared, set_parallel_mode)
        self.activation, first = activation, _Gated if INPUTS[activation] == 2 else LayerNormLinear
        norm = {"normalization": shared.pop("normalization", "LayerNorm")}
        inner = INPUTS[activation] * ffn_hidden_size
        modes = {"init_method": init_method, "parallel_mode": "column"}
        self.fc1 = first(hidden_size, inner, eps, name=f"{name}.fc1", **modes, **norm, **shared)
        modes = {"init_method": output_layer_init_method, "parallel_mode": "row"}
        self.fc2 = Linear(ffn_hidden_size, hidden_size, name=f"{name}.fc2", **modes, **shared)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """forward(inp). is_first_microbatch has no effect: quantization(cache_weights=True) keeps weights that nobody
        has written."""
        return super().forward(inp)


class MultiheadAttention(_OverRanks, _MultiheadAttention):
    """Self-attention of x [S, B, D] ("sbhd") or [B, S, D] ("bshd"), in high precision outside of autocast.

    With set_parallel_mode the ranks of tp_group have an equal number of heads each, as Linear does it: qkv by column
    and proj by row. attn_mask_type: "causal" or "no_mask". q, k and v lie one below the other in the weight of qkv,
    which init_method draws; output_layer_init_method draws that of proj. UserError for an option that would change a
    number and is not supported, such as dropout, which has to be given as 0.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init = None,
        output_layer_init_method: Init = None,
        attn_mask_type: str = "causal",
        input_layernorm: bool = False,
        set_parallel_mode: bool = False,
        qkv_format: str = "sbhd",
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        kind, heads = "MultiheadAttention", num_attention_heads
        _choice(kind, "attn_mask_type", attn_mask_type, tuple(MASKS))
        _choice(kind, "qkv_format", qkv_format, FORMATS)
        _check_heads(kind, hidden_size, heads, arguments)
        shared = _shared(kind, arguments | {"attention_dropout": attention_dropout}, HINTS)
        self._check_ranks(shared, set_parallel_mode)
        if heads % self.ranks:
            raise UserError(f"{kind}: num_attention_heads={heads} does not divide by tp_size={self.ranks}")
        if qkv_format == "bshd" and shared.get("sequence_parallel") and self.ranks > 1:
            raise UserError(f"{kind}: sequence_parallel splits tokens along the first axis; give qkv_format='sbhd'")
        name, self.input_layernorm, self._first_is_tokens = name or "attn", input_layernorm, qkv_format == "sbhd"
        self.heads, self.rope_base, self.is_causal = heads // self.ranks, None, MASKS[attn_mask_type]
        self.quantize_boundaries = False
        norm = {"normalization": shared.pop("normalization", "LayerNorm"), "eps": layernorm_epsilon}
        first, norm = (_NormedQkv, norm) if input_layernorm else (_Qkv, {})
        modes = {"init_method": init_method, "parallel_mode": "column"}
        self.qkv = first(hidden_size, 3 * hidden_size, name=f"{name}.qkv", **modes, **norm, **shared)
        self.dpa = DotProductAttention(name=f"{name}.dpa", recipe=HIGH_PRECISION)
        modes = {"init_method": output_layer_init_method, "parallel_mode": "row"}
        self.proj = Linear(hidden_size, hidden_size, name=f"{name}.proj", **modes, **shared)
        self._share_heads(shared.get("tp_group"))

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks that share the module. UserError for another number of them than tp_size."""
        super().set_tensor_parallel_group(tp_group)
        self._share_heads(tp_group)

    def _share_heads(self, group: ProcessGroup | None) -> None:
        self.dpa.group = group if self.ranks > 1 else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        **arguments: Any,
    ) -> Tensor:
        """forward(hidden_states). is_first_microbatch has no effect. UserError for a mask or another argument that is
        not supported."""
        refuse("MultiheadAttention", {"attention_mask": attention_mask is not None} | arguments)
        return super().forward(hidden_states, checkpoint_core_attention)

    def _added(self, x: Tensor, branch: Branch, checkpoint_core_attention: bool = False) -> tuple[Tensor, Branch]:
        if self.input_layernorm:
            return super()._added(x, branch, checkpoint_core_attention)
        x = add_branch(x, branch)
        qkv = self.qkv(x)
        return x, self.proj(recomputed(self._core, qkv) if checkpoint_core_attention else self._core(qkv))

    def _core(self, qkv: Tensor, *, in_place: bool = False) -> Tensor:
        if not self._first_is_tokens:
            return super()._core(qkv, in_place=in_place)
        return super()._core(qkv.transpose(0, 1).contiguous(), in_place=in_place).transpose(0, 1)


class TransformerLayer(_OverRanks, _TransformerLayer):
    """x + self_attention(x), then x + mlp(x), each of which begins with a norm, in high precision outside of autocast.

    Arguments are those of MultiheadAttention and LayerNormMLP, attn_input_format for qkv_format and self_attn_mask_type
    for attn_mask_type. UserError for an option that would change a number and is not supported, such as dropout, which
    has to be given as 0.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation: str = "gelu",
        self_attn_mask_type: str = "causal",
        attn_input_format: str = "sbhd",
        layer_type: str = "encoder",
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        _choice("TransformerLayer", "layer_type", layer_type, ("encoder",))
        attention = {n: arguments.pop(n) for n in OF_HEADS if n in arguments}
        both = {n: arguments.pop(n) for n in OF_BOTH if n in arguments}
        refuse("TransformerLayer", arguments | {"hidden_dropout": hidden_dropout}, HINTS)
        name = name or "layer"
        self.attn = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            attn_mask_type=self_attn_mask_type,
            qkv_format=attn_input_format,
            input_layernorm=True,
            name=f"{name}.attn",
            **attention,
            **both,
        )
        self.mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, name=f"{name}.mlp", **both
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        **arguments: Any,
    ) -> Tensor:
        """forward(hidden_states). is_first_microbatch has no effect. UserError for a mask or another argument that is
        not supported."""
        refuse("TransformerLayer", {"attention_mask": attention_mask is not None} | arguments)
        return super().forward(hidden_states, checkpoint_core_attention)


def _shared(kind: str, arguments: dict[str, Any], hints: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that linears take; UserError for others that would change a number."""
    refuse(kind, {n: v for n, v in arguments.items() if n not in SHARED}, hints)
    return {n: v for n, v in arguments.items() if n in SHARED}


def _choice(kind: str, argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{kind}: {argument} is {value!r}; it takes {' or '.join(map(repr, allowed))}")


def _check_heads(kind: str, width: int, heads: int, arguments: dict[str, Any]) -> None:
    """Take the arguments that say how q, k and v lie; UserError where they lie otherwise here."""
    groups, channels = arguments.pop("num_gqa_groups", None), arguments.pop("kv_channels", None)
    fused, interleaved = arguments.pop("fuse_qkv_params", False), arguments.pop("qkv_weight_interleaved", True)
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
