"""Arguments of TransformerEngine's constructors and calls: bound in its order, with its defaults, and refused where
they would change something that is not there."""

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
    "init_method": _INIT,
    "output_layer_init_method": _INIT,
    "tp_group": (lambda value: isinstance(value, ProcessGroup), "a ProcessGroup"),
    "params_dtype": (
        lambda value: isinstance(value, torch.dtype) and value in (torch.float32, torch.float16, torch.bfloat16),
        "float32, float16 or bfloat16",
    ),
    "name": (lambda value: isinstance(value, str), "a text"),
}
"""Argument -> whether it takes a value, and what it takes; its default goes as well."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a constructor or a call of TransformerEngine takes behind its required arguments."""

    kind: str
    """The module's or function's name in messages."""
    defaults: Mapping[str, Any]
    """Argument -> its default, in the order of positional arguments."""
    takes: Collection[str]
    """The arguments that have a meaning here."""
    hints: Collection[str] = SAYS_NOTHING
    """The arguments that have no effect, whatever their value is."""

    def given(self, positional: Sequence[Any], named: Mapping[str, Any], kind: str | None = None) -> dict[str, Any]:
        """The arguments that have a meaning here, with the defaults of those that are not given. UserError for an
        argument that TransformerEngine has not, one that comes twice, and one that would change something. kind: its
        name in messages, in place of the own."""
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


def flag(kind: str, name: str, value: Any) -> bool:
    """A value that is true or false. UserError for another one."""
    if not isinstance(value, bool | int | None) or value not in (None, 0, 1):
        raise UserError(f"{kind}: {name} is {shown(value)}; it takes True or False")
    return bool(value)


def refuse(kind: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> None:
    """UserError that names those of the arguments that would change something, whatever their values are. The default
    of an argument changes nothing; without one, neither does None, False or 0."""
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
