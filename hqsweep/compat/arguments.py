"""Arguments of TransformerEngine's constructors and calls: signatures, with their order and defaults (2.20, d0067d0).

An argument that would change a number, and has no counterpart here, is refused.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.errors import UserError, nearest

SAYS_NOTHING = ("device", "get_rng_state_tracker", "rng_tracker_name", "ub_name")
"""Arguments without an effect on numbers: parts of weights are cut from one whole, which every rank draws alike."""
PLAIN = (type(None), bool, int, float, str)
_MASKS = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right",
    "arbitrary", "padding,causal", "causal,padding",
)  # fmt: skip
CHOICES: Mapping[str, tuple[str, ...]] = {
    "parallel_mode": ("column", "row"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "activation": (
        "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu",
        "clamped_swiglu",
    ),
    "attn_mask_type": _MASKS,
    "self_attn_mask_type": _MASKS,
    "enc_dec_attn_mask_type": _MASKS,
    "attention_type": ("self", "cross"),
    "qkv_format": ("sbhd", "bshd", "thd"),
    "attn_input_format": ("sbhd", "bshd"),
    "layer_type": ("encoder", "decoder"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "qk_norm_type": ("L2Normalization", "RMSNorm", "LayerNorm"),
    "core_attention_bias_type": ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"),
}  # fmt: skip
"""Argument -> the values that it takes."""


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_share(value: Any) -> bool:
    return _is_epsilon(value) and value <= 1


def _is_window(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(type(end) is int and end >= -1 for end in value)


def _is_tensors(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, Tensor) for part in parts)


def _are_names(value: Any) -> bool:
    names = tuple(value) if isinstance(value, tuple | list | Mapping) else ()
    return len(names) > 0 and all(isinstance(name, str) for name in names)


_EPSILON, _COUNT = (_is_epsilon, "a finite number, 0 or more"), (_is_count, "a number, 1 or more")
_INIT, _SHARE = (callable, "a function of the weight"), (_is_share, "a number from 0 to 1")
_TENSOR = (lambda value: isinstance(value, Tensor), "a tensor")
_TENSORS = (_is_tensors, "a tensor, or a tuple of two")
_WINDOW = (_is_window, "two numbers, -1 or more")
_FLAG = (lambda value: isinstance(value, bool), "True or False")
TAKEN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "eps": _EPSILON,
    "layernorm_epsilon": _EPSILON,
    "qk_norm_eps": _EPSILON,
    "amax_epsilon": _EPSILON,
    "softmax_scale": _EPSILON,
    "hidden_dropout": _SHARE,
    "attention_dropout": _SHARE,
    "drop_path_rate": _SHARE,
    "tp_size": (_is_count, "the number of ranks, 1 or more"),
    "kv_channels": _COUNT,
    "num_gqa_groups": _COUNT,
    "amax_history_len": _COUNT,
    "quantization_alignment": _COUNT,
    "max_seqlen_q": _COUNT,
    "max_seqlen_kv": _COUNT,
    "window_size": _WINDOW,
    "enc_dec_window_size": _WINDOW,
    "bottom_right_diagonal": _FLAG,
    "enc_dec_bottom_right_diagonal": _FLAG,
    "pad_between_seqs": _FLAG,
    "attention_mask": _TENSORS,
    "enc_dec_attn_mask": _TENSORS,
    "rotary_pos_emb": _TENSORS,
    **dict.fromkeys(("query_layer", "key_layer", "value_layer", "qkv_layer", "kv_layer"), _TENSOR),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), _TENSOR),
    **dict.fromkeys(("encoder_output", "core_attention_bias", "alibi_slopes"), _TENSOR),
    "qkv_interleave_dim": (lambda value: type(value) is int and value in (-2, -3), "-3 or -2"),
    "init_method": _INIT,
    "output_layer_init_method": _INIT,
    "tp_group": (lambda value: isinstance(value, ProcessGroup), "a ProcessGroup"),
    "activation_params": (lambda value: isinstance(value, Mapping), "a mapping of numbers"),
    "parameters_split": (_are_names, "names of parts of the weight, or a mapping of names to rows"),
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
    refused: Collection[str] = ()
    """The arguments that have no counterpart here, and take only their default, or None, False and 0."""
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
        refuse(kind, {n: every[n] for n in self.refused}, self.defaults)
        taking = {n: v for n, v in every.items() if n not in self.refused and n not in self.hints}
        return {n: taken(kind, n, v, self.defaults[n]) for n, v in taking.items()}

    def builds(self, init: Callable[..., None]) -> Callable[..., None]:
        """A constructor with these optional arguments, which builds where `device` says so (built_on)."""
        needed = init.__code__.co_argcount - 1

        @wraps(init)
        def build(module: Any, *positional: Any, **named: Any) -> None:
            given = dict(zip(self.defaults, positional[needed:], strict=False)) | named
            with built_on(given.get("device")):
                init(module, *positional, **named)

        return build


def built_on(device: Any) -> AbstractContextManager[Any]:
    """A context that builds modules without memory for device="meta"; other devices have no effect."""
    return torch.device("meta") if str(device) == "meta" else nullcontext()


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
    refused = [n for n, v in arguments.items() if not _is_neutral(v, defaults.get(n))]
    if refused:
        listed = ", ".join(f"{n}={shown(arguments[n])}" for n in refused)
        raise UserError(f"{kind}: {listed} {'has' if len(refused) == 1 else 'have'} no counterpart here; leave it out")


def _is_neutral(value: Any, default: Any) -> bool:
    """Whether an argument of this value changes nothing; it is never asked for its truth."""
    if not isinstance(value, (*PLAIN, tuple, list)):
        return False
    if isinstance(value, tuple | list):
        value = tuple(value)
        if not all(isinstance(entry, PLAIN) for entry in value):
            return False
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
