"""Arguments of TransformerEngine's constructors and calls: signatures, with their order and defaults (2.20, d0067d0).

An argument that would change a number, and has no counterpart here, is refused.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError, nearest

SAYS_NOTHING = ("device", "get_rng_state_tracker", "rng_tracker_name", "ub_name")
"""Arguments without an effect on numbers: parts of weights are cut from one whole, which every rank draws alike."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "window_size": (None, (-1, -1), (-1, 0)),
    "enc_dec_window_size": (None, (-1, -1), (-1, 0)),
    "enc_dec_attn_mask_type": (None, "no_mask"),
}
"""Argument -> the values that change nothing, where its default is not the only one. Both windows are all positions
that the mask leaves."""
PLAIN = (type(None), bool, int, float, str)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "parallel_mode": ("column", "row"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": ("gelu", "swiglu"),
    "attn_mask_type": ("causal", "no_mask"),
    "self_attn_mask_type": ("causal", "no_mask"),
    "qkv_format": ("sbhd", "bshd"),
    "attn_input_format": ("sbhd", "bshd"),
    "layer_type": ("encoder",),
}
"""Argument -> the values that it takes."""


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_EPSILON, _COUNT = (_is_epsilon, "a finite number, 0 or more"), (_is_count, "a number, 1 or more")
_INIT = (callable, "a function of the weight")
TAKEN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "eps": _EPSILON,
    "layernorm_epsilon": _EPSILON,
    "amax_epsilon": _EPSILON,
    "tp_size": (_is_count, "the number of ranks, 1 or more"),
    "kv_channels": _COUNT,
    "num_gqa_groups": _COUNT,
    "amax_history_len": _COUNT,
    "quantization_alignment": _COUNT,
    "init_method": _INIT,
    "output_layer_init_method": _INIT,
    "tp_group": (lambda value: isinstance(value, ProcessGroup), "a ProcessGroup"),
    "params_dtype": (
        lambda value: isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16),
        "float32, float16 or bfloat16",
    ),
    "name": (lambda value: isinstance(value, str), "a text"),
}
"""Argument -> (whether it takes a value, words for the values that it takes); its default is taken, too."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The optional arguments of a constructor or a call of TransformerEngine."""

    kind: str
    """The module's or function's name in messages."""
    defaults: Mapping[str, Any]
    """Argument -> its default, in the order of positional arguments."""
    takes: Collection[str]
    """The arguments that have a meaning here, with defaults for the others. UserError for an argument that
    TransformerEngine lacks, one that comes twice, and one that would change something. kind: the name for messages, in
    place of the own."""
    hints: Collection[str] = SAYS_NOTHING
    """The arguments that have no effect, for any value."""

    def given(self, positional: Sequence[Any], named: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
        """The arguments that have a meaning here, with defaults for the others. UserError for an argument that
        TransformerEngine lacks, one that comes twice, and one that would change something. kind: the name for messages,
        in place of the own."""
        names, kind = list(self.defaults), kind or self.kind
        if len(positional) > len(names):
            raise UserError(f"{kind}: {len(positional) - len(names)} positional arguments too many")
        arguments = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if name not in self.defaults:
                raise UserError(f"{kind}: TransformerEngine has no argument {name!r}{nearest(name, names)}")
            if name in arguments:
                raise UserError(f"{kind}: {name} is given twice, by position and by name")
            arguments[name] = value
        every = {**self.defaults, **arguments}
        others = {n: v for n, v in every.items() if n not in self.takes and n not in self.hints}
        refuse(kind, others, self.defaults)
        return {n: taken(kind, n, v, self.defaults[n]) for n, v in every.items() if n in self.takes}


def taken(kind: str, name: str, value: Any, default: Any) -> Any:
    """A value that an argument takes. UserError for another one."""
    if isinstance(default, bool):
        return flag(kind, name, value)
    if value is None and default is None:
        return value
    if name in CHOICES:
        takes = isinstance(value, str) and value in CHOICES[name]
        listed = [repr(choice) for choice in CHOICES[name]] + ["None"] * (default is None)
        allowed = " or ".join([", ".join(listed[:-1]), listed[-1]] if listed[1:] else listed)
    else:
        check, allowed = TAKEN[name]
        takes, allowed = check(value), allowed + ", or None" * (default is None)
    if not takes:
        raise UserError(f"{kind}: {name} is {shown(value)}; it takes {allowed}")
    return value


def one_of(where: str, argument: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """UserError for a value that is none of these; it is compared with nothing of another type."""
    if not any(type(value) is type(known) and value == known for known in allowed):
        listed = " or ".join(str(known) for known in allowed)
        raise UserError(f"{where}: {argument} is {shown(value)}; it takes {listed}")


def flag(kind: str, name: str, value: Any) -> bool:
    """A value that is true or false. UserError for another one."""
    if not isinstance(value, bool | int | None) or value not in (None, 0, 1):
        raise UserError(f"{kind}: {name} is {shown(value)}; it takes True or False")
    return bool(value)


def refuse(kind: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> None:
    """UserError that names the arguments that would change something. The default of an argument changes nothing;
    without a default, neither does None, False or 0."""
    refused = [n for n, v in arguments.items() if not _is_neutral(n, v, defaults.get(n))]
    if refused:
        listed = ", ".join(f"{n}={shown(arguments[n])}" for n in refused)
        instead = [f"{n}={NEUTRAL[n][0]}" for n in refused if n in NEUTRAL and None not in NEUTRAL[n]]
        remedy = f"give {', '.join(instead)}" if instead else ""
        if len(instead) < len(refused):
            remedy += f"{' and ' if instead else ''}leave {'the rest' if instead else 'it'} out"
        raise UserError(f"{kind}: {listed} {'has' if len(refused) == 1 else 'have'} no counterpart here; {remedy}")


def _is_neutral(name: str, value: Any, default: Any) -> bool:
    """Whether an argument of this value changes nothing; it is never asked for its truth."""
    if not isinstance(value, (*PLAIN, tuple, list)):
        return False
    if isinstance(value, tuple | list):
        value = tuple(value)
        if not all(isinstance(entry, PLAIN) for entry in value):
            return False
    if name in NEUTRAL:
        return value in NEUTRAL[name]
    return value is None or value == default or (not default and not value)


def shown(value: Any) -> str:
    """A value in a message: itself if it is short and plain, else its type and shape."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} {list(shape)}"
    if isinstance(value, Enum | torch.dtype):
        return str(value)
    if isinstance(value, (*PLAIN, tuple, list)) and len(repr(value)) <= 60:
        return repr(value)
    return f"a {type(value).__name__}"


SHARED = (
    "sequence_parallel", "fuse_wgrad_accumulation", "tp_group", "tp_size", "init_method", "bias", "params_dtype",
    "name",
)  # fmt: skip
"""Arguments that have a meaning in every module."""
OVERLAPS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad")
"""Arguments of layers without an effect: they need ub_tp_comm_overlap, which is refused."""
HINTS = ("layer_number", "seq_length", "micro_batch_size", *OVERLAPS, *SAYS_NOTHING)
OF_CALL = ("is_first_microbatch", "fast_zero_fill", "bottom_right_diagonal", "enc_dec_bottom_right_diagonal")
"""Arguments of calls without an effect: quantization(cache_weights=True) keeps the operands of unchanged weights, and
there are as many queries as keys."""
_UB = dict.fromkeys(
    ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), False
)  # fmt: skip

LINEAR = Signature(
    kind="Linear",
    defaults={
        "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
        "get_rng_state_tracker": None, "rng_tracker_name": None, "init_method": None, "bias": True,
        "return_bias": False, "params_dtype": None, "parallel_mode": None, "parameters_split": None, "device": "cuda",
        **_UB, "ub_name": None, "delay_wgrad_compute": False, "symmetric_ar_type": None, "save_original_input": False,
        "name": None,
    },
    takes=(*SHARED, "parallel_mode", "save_original_input"),
)  # fmt: skip
LAYERNORM_LINEAR = Signature(
    kind="LayerNormLinear",
    defaults={
        "eps": 1e-5, "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
        "get_rng_state_tracker": None, "init_method": None, "bias": True, "normalization": "LayerNorm",
        "return_bias": False, "params_dtype": None, "parallel_mode": None, "return_layernorm_output": False,
        "return_layernorm_output_gathered": False, "parameters_split": None, "zero_centered_gamma": False,
        "device": "cuda", "ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
        "ub_bulk_wgrad": False, "ub_bulk_dgrad": False, "ub_name": None, "delay_wgrad_compute": False,
        "symmetric_ar_type": None, "name": None,
    },
    takes=(*SHARED, "eps", "normalization", "parallel_mode"),
)  # fmt: skip
OF_LINEAR_CALL = Signature(
    kind="forward",
    defaults={"is_first_microbatch": None, "fp8_output": False, "fp8_grad": False},
    takes=(),
    hints=OF_CALL,
)
OF_MLP_CALL = Signature(kind="LayerNormMLP", defaults={"is_first_microbatch": None}, takes=(), hints=OF_CALL)
LAYERNORM_MLP = Signature(
    kind="LayerNormMLP",
    defaults={
        "eps": 1e-5, "sequence_parallel": False, "return_bias": False, "get_rng_state_tracker": None, "tp_group": None,
        "tp_size": 1, "init_method": None, "bias": True, "normalization": "LayerNorm", "activation": "gelu",
        "activation_params": None, "output_layer_init_method": None, "fuse_wgrad_accumulation": False,
        "params_dtype": None, "return_layernorm_output": False, "return_layernorm_output_gathered": False,
        "seq_length": None, "micro_batch_size": None, "set_parallel_mode": False, "zero_centered_gamma": False,
        "device": "cuda", "ub_overlap_ag": False, "name": None, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "delay_wgrad_compute": False, "symmetric_ar_type": None,
        "checkpoint": False,
    },
    takes=(*SHARED, "eps", "normalization", "activation", "output_layer_init_method", "set_parallel_mode"),
    hints=(*HINTS, "checkpoint"),
)  # fmt: skip
GROUPED_LINEAR = Signature(
    kind="GroupedLinear",
    defaults={
        "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
        "get_rng_state_tracker": None, "rng_tracker_name": None, "init_method": None, "bias": True,
        "return_bias": False, "params_dtype": None, "parallel_mode": None, "device": "cuda", "ub_overlap_rs": False,
        "ub_overlap_ag": False, "ub_name": None, "delay_wgrad_compute": False, "save_original_input": False,
        "single_grouped_weight": False, "single_grouped_bias": False, "name": None, "use_grouped_tensor": None,
    },
    takes=(*SHARED, "parallel_mode", "save_original_input", "single_grouped_weight", "single_grouped_bias"),
)  # fmt: skip
OF_GROUPED_CALL = Signature(
    kind="forward", defaults={"is_first_microbatch": None, "out": None, "dgrad_out": None}, takes=(), hints=OF_CALL
)
_OF_HEADS = ("kv_channels", "num_gqa_groups", "fuse_qkv_params", "qkv_weight_interleaved")
MULTIHEAD_ATTENTION = Signature(
    kind="MultiheadAttention",
    defaults={
        "kv_channels": None, "attention_dropout": 0.1, "layernorm_epsilon": 1e-5, "init_method": None,
        "output_layer_init_method": None, "layer_number": None, "attn_mask_type": "causal", "window_size": None,
        "bottom_right_diagonal": None, "tp_group": None, "tp_size": 1, "num_gqa_groups": None,
        "fuse_wgrad_accumulation": False, "get_rng_state_tracker": None, "sequence_parallel": False,
        "params_dtype": None, "return_bias": False, "return_layernorm_output": False, "input_layernorm": False,
        "attention_type": "self", "set_parallel_mode": False, "fuse_qkv_params": False, "zero_centered_gamma": False,
        "qkv_weight_interleaved": True, "rotary_pos_interleaved": False, **dict.fromkeys(OVERLAPS[:3], False),
        "ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "bias": True, "normalization": "LayerNorm", "device": "cuda",
        "qkv_format": "sbhd", "name": None, "qk_norm_type": None, "qk_norm_eps": 1e-6, "qk_norm_before_rope": False,
        "seq_length": None, "micro_batch_size": None, "softmax_type": "vanilla",
    },
    takes=(*SHARED, *_OF_HEADS, "output_layer_init_method", "set_parallel_mode", "normalization", "layernorm_epsilon",
           "attn_mask_type", "input_layernorm", "qkv_format"),
    hints=(*HINTS, "bottom_right_diagonal"),
)  # fmt: skip
TRANSFORMER_LAYER = Signature(
    kind="TransformerLayer",
    defaults={
        "num_gqa_groups": None, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.1, "attention_dropout": 0.1,
        "init_method": None, "output_layer_init_method": None, "layer_number": None, "kv_channels": None,
        "self_attn_mask_type": "causal", "window_size": None, "bottom_right_diagonal": None,
        "enc_dec_attn_mask_type": "no_mask", "enc_dec_bottom_right_diagonal": None, "enc_dec_window_size": None,
        "tp_group": None, "tp_size": 1, "params_dtype": None, "get_rng_state_tracker": None,
        "fuse_wgrad_accumulation": False, "seq_length": None, "micro_batch_size": None, "sequence_parallel": False,
        "apply_residual_connection_post_layernorm": False, "output_layernorm": False, "parallel_attention_mlp": False,
        "layer_type": "encoder", "drop_path_rate": 0.0, "set_parallel_mode": False, "fuse_qkv_params": False,
        "rotary_pos_interleaved": False, "zero_centered_gamma": False, "qkv_weight_interleaved": True,
        "ub_tp_comm_overlap": False, "ub_overlap_ag": True, "ub_overlap_rs": True, "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "bias": True, "activation": "gelu", "activation_params": None,
        "normalization": "LayerNorm", "device": "cuda", "attn_input_format": "sbhd", "name": None, "qk_norm_type": None,
        "qk_norm_eps": 1e-6, "qk_norm_before_rope": False, "softmax_type": "vanilla",
    },
    takes=(*SHARED, *_OF_HEADS, "output_layer_init_method", "set_parallel_mode", "normalization", "layernorm_epsilon",
           "self_attn_mask_type", "layer_type", "activation", "attn_input_format"),
    hints=(*HINTS, "bottom_right_diagonal", "enc_dec_bottom_right_diagonal"),
)  # fmt: skip
_OF_CORE = {
    "is_first_microbatch": None, "checkpoint_core_attention": False, "inference_params": None, "rotary_pos_emb": None,
    "core_attention_bias_type": "no_bias", "core_attention_bias": None, "alibi_slopes": None, "cu_seqlens_q": None,
    "cu_seqlens_kv": None, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "max_seqlen_q": None,
    "max_seqlen_kv": None, "fast_zero_fill": True, "pad_between_seqs": None,
}  # fmt: skip
OF_ATTENTION_CALL = Signature(
    kind="MultiheadAttention",
    defaults={
        "attention_mask": None, "encoder_output": None, "attn_mask_type": None, "window_size": None,
        "bottom_right_diagonal": None, **_OF_CORE,
    },
    takes=("attn_mask_type", "checkpoint_core_attention"),
    hints=OF_CALL,
)  # fmt: skip
OF_LAYER_CALL = Signature(
    kind="TransformerLayer",
    defaults={
        "attention_mask": None, "self_attn_mask_type": None, "window_size": None, "bottom_right_diagonal": None,
        "encoder_output": None, "enc_dec_attn_mask": None, "enc_dec_attn_mask_type": None, "enc_dec_window_size": None,
        "enc_dec_bottom_right_diagonal": None, **_OF_CORE,
    },
    takes=("self_attn_mask_type", "checkpoint_core_attention"),
    hints=OF_CALL,
)  # fmt: skip
