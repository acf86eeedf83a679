"""The histories of delayed scaling in TransformerEngine's checkpoints: read from an _extra_state, and written to one.

There it is a pickle: the recipe, and for each slot of a module a column of amax_history_* [L, slots] and a scale. Here
each slot and direction has a state with the same order of amaxes. The pickle is read without its code: only tensors,
plain values, and the fields of recipes are known. TransformerEngine reads one only under
NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1.
"""

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hqsweep.formats.fp8 import end_step
from hqsweep.quant.delayed import NO_STEP
from hqsweep.quant.hybrid import DIRECTIONS

RECIPES = "transformer_engine.common.recipe"
SLOTS = {"fwd": ("input", "weight", None), "bwd": ("grad_output", None)}
"""Pass -> the tensors of the columns of one product; None: an output, which has no state here."""
LARGEST = {"fwd": 448.0, "bwd": 57344.0}
"""Pass -> the largest value of E4M3 and of E5M2: Format.HYBRID."""
State = dict[str, Any]


def read(value: Tensor, products: Sequence[str]) -> State | None:
    """The states of an _extra_state, by the keys of hqsweep's modules; None where it is none of delayed scaling.

    products: the prefix of the states of each product of the module, such as "states." or "fc1.states.".
    """
    try:
        found = _Unpickler(io.BytesIO(bytes(value.cpu().numpy().tobytes()))).load()
        largest = found["recipe"].fields["fp8_format"].largest
        shift = 2.0 ** found["recipe"].fields["margin"]
        states: State = {}
        for which, tensors in SLOTS.items():
            histories, scales = found[f"amax_history_{which}"], found[f"scale_{which}"]
            columns = [(prefix, tensor) for prefix in products for tensor in tensors]
            for column, (prefix, tensor) in enumerate(columns):
                if tensor is not None:
                    history = histories[:, column].float().clone()
                    amax = _amax(history, scales[column].float() * shift, largest[which])
                    for direction in DIRECTIONS:
                        key = f"{prefix}{tensor}_{direction}."
                        states |= {f"{key}history": history.clone(), f"{key}amax": amax.clone()}
                        states[f"{key}_extra_state"] = torch.tensor(NO_STEP)
        return states
    except Exception:  # what is no such pickle makes an unpickler raise anything
        return None


def _amax(history: Tensor, scale: Tensor, largest: float) -> Tensor:
    """float32 [1, 1]: the amax whose scale is largest / amax; one of the history, if that is."""
    known = history[(largest / history) == scale]
    amax = known[0] if len(known) else largest / scale
    return torch.where(scale == 1, 0.0, amax).reshape(1, 1) if not len(known) else amax.reshape(1, 1)


def columns(states: Mapping[str, Tensor], products: Sequence[str]) -> State | None:
    """amax_history_* float32 [L, slots] and scale_* [slots] of each pass, from these states by their keys; None where a
    product has no states.

    The rowwise state of each slot is taken. A step that has not ended ends first. Outputs have empty histories.
    """
    state: State = {}
    lengths = {len(v) for k, v in states.items() if k.endswith("_rowwise.history")}
    if len(lengths) != 1:
        return None
    for which, tensors in SLOTS.items():
        histories, scales = [], []
        for prefix in products:
            for tensor in tensors:
                key = f"{prefix}{tensor}_rowwise."
                if tensor is not None and f"{key}history" not in states:
                    return None
                history, amax = torch.zeros(max(lengths)), torch.zeros(1, 1)
                if tensor is not None:
                    history, amax = (states[f"{key}{n}"].detach().cpu() for n in ("history", "amax"))
                    history, amax = end_step(history, amax, most_recent=False)
                histories.append(history)
                scales.append(_scale(amax, LARGEST[which]))
        state |= {f"amax_history_{which}": torch.stack(histories, dim=1), f"scale_{which}": torch.stack(scales)}
    return state


class ScalingMeta(NamedTuple):
    """The delayed scaling of one pass, to read."""

    amax_history: Tensor
    """float32 [L, slots] on the CPU: a copy."""


def fp8_meta(states: Mapping[str, Tensor], products: Sequence[str]) -> dict[str, Any]:
    """scaling_fwd and scaling_bwd of a module's delayed scaling; nothing where a product has no states."""
    found = columns(states, products)
    if found is None:
        return {}
    metas = {f"scaling_{which}": ScalingMeta(found[f"amax_history_{which}"]) for which in SLOTS}
    return {"fp8_checkpoint": True, "num_gemms": len(products), **metas}


def written(states: Mapping[str, Tensor], products: Sequence[str]) -> Tensor | None:
    """uint8 [bytes]: the _extra_state for these states, by their keys; None where a product has no states."""
    state = columns(states, products)
    if state is None:
        return None
    state["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": len(products)}
    with _their_names() as recipe:
        state["recipe"] = recipe(len(state["amax_history_fwd"]))
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def _scale(amax: Tensor, largest: float) -> Tensor:
    return torch.where(amax > 0, largest / amax, 1.0).reshape(())


class _Fields:
    """A recipe of a checkpoint: its fields, without its class."""

    fields: Mapping[str, Any]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.fields = state


class _Value:
    """A format of a checkpoint, or its two largest values."""

    def __new__(cls, *values: Any) -> "_Value":
        made = super().__new__(cls)
        made.values = values
        return made

    @property
    def largest(self) -> dict[str, float]:
        """Pass -> the largest value of its tensors."""
        (pair,) = self.values
        forward, backward = pair.values if isinstance(pair, _Value) else pair
        return {"fwd": forward, "bwd": backward}


class _Unpickler(pickle.Unpickler):
    """Knows tensors, OrderedDict and the recipes of TransformerEngine by name, and runs no code of the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if module == RECIPES:
            return _Value if "Format" in name else _Fields
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "rebuild_tensor_v2"): _tensor,
            ("torch", "load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
        }
        return known[module.split(".")[0], name.lstrip("_")]


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return torch.tensor([], dtype=storage.dtype).set_(storage, offset, size, stride)


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


@contextmanager
def _their_names() -> Iterator[Any]:
    """A function from the length of histories to a DelayedScaling that pickles under TransformerEngine's names.

    Its class and those of its fields have these names inside, whether TransformerEngine is installed or not.
    """
    module = ModuleType(RECIPES)
    format_type = type("Format", (), {"__reduce__": lambda self: (format_type, (_largest(448, 57344),))})
    pair = type("_FormatHelper", (_Largest,), {"__slots__": ()})

    def _largest(*values: float) -> Any:
        return pair(*values)

    recipe_type = type("DelayedScaling", (), {})
    for made in (format_type, pair, recipe_type):
        made.__module__ = RECIPES
        setattr(module, made.__name__, made)
    parts = RECIPES.split(".")
    packages = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {name: sys.modules.get(name) for name in packages}
    missing = {name: ModuleType(name) for name in packages if name not in sys.modules}
    sys.modules.update(missing | {RECIPES: module})

    def recipe(length: int) -> Any:
        made = recipe_type()
        made.__dict__ |= {
            "margin": 0, "fp8_format": format_type(), "amax_history_len": length, "amax_compute_algo": "max",
            "scaling_factor_compute_algo": None, "reduce_amax": True, "fp8_dpa": False, "fp8_mha": False,
            "backward_override": None,
        }  # fmt: skip
        return made

    try:
        yield recipe
    finally:
        for name, module_before in before.items():
            if module_before is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module_before
