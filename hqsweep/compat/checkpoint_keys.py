"""The keys of TransformerEngine's checkpoints: its state_dicts load into modules of its names, and can be made of them.

A module's own state_dict has this package's keys, and these load as well. Below, "" is the module itself:

    Linear, GroupedLinear   the same keys
    LayerNormLinear         layer_norm_weight, layer_norm_bias  ->  norm.weight, norm.bias
    LayerNormMLP            layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias
                            ->  fc1.norm.weight, fc1.norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias
    MultiheadAttention      layernorm_qkv.*  ->  qkv.*  (with input_layernorm; without it both say qkv.*)
                            query_weight, key_weight, value_weight  ->  one below the other in weight; biases alike
    TransformerLayer        self_attention.*, layernorm_mlp.*  ->  attn.*, mlp.*
    all                     _extra_state  ->  states.*: the histories of delayed scaling; see below

With fuse_qkv_params the weight of q, k and v is one piece, whose rows are in the order of heads unless
qkv_weight_interleaved is False. It loads into a module that is built with the same two options, and is refused
elsewhere. An _extra_state that is not empty is a pickle: hqsweep.compat.extra_state. A warning says where it is not
read; histories then begin anew.
"""

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hqsweep.compat import extra_state
from hqsweep.quant.tensor import HybridQuantizedTensor

EXTRA_STATE = "_extra_state"
State = MutableMapping[str, Any]


class TakesKeys(nn.Module):
    """A module whose load_state_dict takes TransformerEngine's keys, too."""

    KEYS: ClassVar[Mapping[str, str]] = {}
    """TransformerEngine's key -> this module's key. A key that ends in a dot stands for all keys that begin with it."""
    split: ClassVar[Mapping[str, int]] = {}
    """Name of a part of the weight in parameters_split -> its rows, one part below the other."""
    has_extra_state = True
    """Whether its state_dict has an _extra_state there."""

    def __getattr__(self, name: str) -> Any:
        """A parameter or a module under TransformerEngine's name, such as layer_norm_weight or query_weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            part, _, kind = name.rpartition("_")
            own = self.KEYS.get(name) or self.KEYS.get(f"{name}.", "").removesuffix(".")
            if part in self.split and kind in ("weight", "bias"):
                return self._rows_of(part, getattr(self, kind))
            if not own:
                raise
        return reduce(getattr, own.split("."), self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign, also by TransformerEngine's name, such as layer_norm_weight."""
        *path, own = self.KEYS.get(name, name).split(".")
        if path:
            setattr(reduce(getattr, path, self), own, value)
        else:
            super().__setattr__(name, value)

    def _rows_of(self, part: str, whole: Tensor | None) -> Tensor | None:
        sizes = list(self.split.values())
        index = list(self.split).index(part)
        start = sum(sizes[:index])
        return None if whole is None else whole[start : start + sizes[index]]

    def products(self) -> Sequence[str]:
        """The prefix of the delayed-scaling states of each product whose columns its _extra_state has."""
        return ("states.",)

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """The histories of delayed scaling, to read: scaling_fwd and scaling_bwd, whose amax_history has a column for
        each slot of each product. Empty without delayed scaling."""
        return extra_state.fp8_meta(dict(self.named_buffers()), self.products())

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        take_extra_state(state_dict, prefix, self)
        rename(state_dict, prefix, self.KEYS)
        for name in ("weight", "bias") if self.split else ():
            _join(state_dict, prefix, name, self.split)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def give_keys(self, state: State, prefix: str) -> None:
        """Rename this module's keys in a state_dict to TransformerEngine's; its children have done so."""
        for name in ("weight", "bias") if self.split else ():
            _split(state, prefix, name, self.split)
        rename(state, prefix, {own: theirs for theirs, own in self.KEYS.items()})
        if self.has_extra_state:
            own = {k: state[f"{prefix}{k}"] for k in _below(state, prefix) if ".states." in f".{k}"}
            found = extra_state.written(own, self.products()) if own else None
            state[f"{prefix}{EXTRA_STATE}"] = torch.empty(0, dtype=torch.uint8) if found is None else found
            for key in own:
                del state[f"{prefix}{key}"]


def transformer_engine_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state_dict of a model with TransformerEngine's keys for its modules of these names, which loads there.

    Weights that are held quantized are given as their values. States of delayed scaling of linears and experts become
    an _extra_state, and others are left out, which a warning says.
    """
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        held = isinstance(value, HybridQuantizedTensor)
        state[key] = value.dequantize() if held else value
    for name, module in reversed(list(model.named_modules(remove_duplicate=False))):
        if isinstance(module, TakesKeys):
            module.give_keys(state, f"{name}." if name else "")
    for key in [key for key in state if ".states." in f".{key}"]:
        warnings.warn(f"{key}: states of delayed scaling are left out; they begin anew there", stacklevel=2)
        del state[key]
    return state


def _below(state: State, prefix: str) -> list[str]:
    """The keys below a prefix, without it."""
    return [key.removeprefix(prefix) for key in state if key.startswith(prefix)]


def rename(state: State, prefix: str, keys: Mapping[str, str]) -> None:
    """Give the entries below prefix their other names, unless there is one of that name."""
    for key in [key for key in state if key.startswith(prefix)]:
        own = key.removeprefix(prefix)
        found = [(old, new) for old, new in keys.items() if own == old or (old.endswith(".") and own.startswith(old))]
        for old, new in found[:1]:
            renamed = f"{prefix}{new}{own.removeprefix(old)}"
            if renamed not in state:
                state[renamed] = state.pop(key)


def take_extra_state(state: State, prefix: str, module: TakesKeys) -> None:
    """Put the histories of a module's _extra_state in place of it; print a warning if it has others."""
    value = state.get(f"{prefix}{EXTRA_STATE}")
    found = extra_state.read(value, module.products()) if isinstance(value, Tensor) and value.numel() else None
    if found is None:
        drop_extra_state(state, prefix, type(module).__name__)
    else:
        del state[f"{prefix}{EXTRA_STATE}"]
        state.update({f"{prefix}{key}": tensor for key, tensor in found.items()})


def drop_extra_state(state: State, prefix: str, kind: str) -> None:
    """Remove the _extra_state of a module, and print a warning if it had content."""
    key = f"{prefix}{EXTRA_STATE}"
    if key not in state:
        return
    value = state.pop(key)
    if value is not None and not (isinstance(value, Tensor) and value.numel() == 0):
        warnings.warn(
            f"{kind}: {key} of the checkpoint is a pickle that does not have the histories of delayed scaling of this"
            " module; it is not read, and histories begin anew",
            stacklevel=2,
        )


def _join(state: State, prefix: str, name: str, split: Mapping[str, int]) -> None:
    keys = [f"{prefix}{part}_{name}" for part in split]
    if f"{prefix}{name}" not in state and all(isinstance(state.get(key), Tensor) for key in keys):
        state[f"{prefix}{name}"] = torch.cat([state.pop(key) for key in keys])


def _split(state: State, prefix: str, name: str, split: Mapping[str, int]) -> None:
    whole = state.pop(f"{prefix}{name}", None)
    if whole is not None:
        parts = zip(split, whole.split(list(split.values())), strict=True)
        state.update({f"{prefix}{part}_{name}": rows for part, rows in parts})
