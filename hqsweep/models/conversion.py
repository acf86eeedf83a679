"""Conversion: the report of convert() on a model, and which of its modules have computed a product by our code since.

A product counts in eager mode and in a compiled graph. Modules that have computed nothing are named at the end of the
first training step, in whatever loop it runs.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.memo import constant_result
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.quant.hybrid import is_low
from hqsweep.recipe.roles import TENSOR_TYPES
from hqsweep.torch_private import dynamo_output, queue_callback

CALLED = "called"
"""The attribute of a part that says whether our code computed its product since it was made, or since forget_call()."""


def note_call(part: QuantizedModule) -> None:
    """Note that our code computes a product of this part.

    A compiled graph notes it whenever it runs. The body of an operator of higher order, such as torch.utils.checkpoint,
    may not write: there the trace notes it once.
    """
    if not torch.compiler.is_compiling():
        part.__dict__[CALLED] = True
    elif not torch.compiler.is_dynamo_compiling() or not _is_noted_by_the_trace():
        part.called = True  # as torch.compile replays it


def was_called(part: QuantizedModule) -> bool:
    """Whether note_call was called since the part was made, or since forget_call()."""
    return part.__dict__.get(CALLED, False)


def forget_call(part: QuantizedModule) -> None:
    """Have was_called say no until note_call is called again."""
    part.__dict__.pop(CALLED, None)


@constant_result
def _is_noted_by_the_trace() -> bool:
    """Runs while note_call is traced, and notes its `part` if that is in the body of an operator."""
    graph = dynamo_output()
    if graph.current_tracer.parent is None:
        return False
    traced = graph.current_tx.symbolic_locals.get("part")
    if traced is not None:
        traced.realize().value.__dict__[CALLED] = True
    return True


SHOWN = 8
"""The number of names in a warning; the others are counted."""


class FirstStep:
    """Warns at the end of the first backward pass that goes through one of these parts, and then never again."""

    def __init__(self, parts: Sequence[QuantizedModule]) -> None:
        self.parts = [ref(part) for part in parts]
        self.is_over = False
        for part in parts:
            _WAITING[part] = self

    def seen(self, gradient: Tensor) -> None:
        """The hook of a part's output."""
        if not self.is_over:
            self.is_over = True
            queue_callback(self._end)

    def _end(self) -> None:
        parts = [part for part in (known() for known in self.parts) if part is not None]
        for part in parts:
            if _WAITING.get(part) is self:
                del _WAITING[part]
        names = [part.name for part in parts if not was_called(part)]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            warnings.warn(
                f"hqsweep.convert: {len(names)} of {len(parts)} converted modules computed nothing in the first step,"
                f" so the recipe has no effect there: {', '.join(names[:SHOWN])}{more}. They were not called, or their"
                " weights were read by something else, such as a fused loss or a hook that replaces forward",
                stacklevel=2,
            )


_WAITING: WeakKeyDictionary[QuantizedModule, FirstStep] = WeakKeyDictionary()
"""Part -> FirstStep, for every part that has seen no backward pass yet. It is not an attribute of the part: copies and
pickles would carry it."""


def watched(part: QuantizedModule, y: Tensor) -> Tensor:
    """Return y, the output of this part, with a hook on its gradient that notes the first backward pass.

    In a trace y gets no hook. A traced read of _WAITING would make its parts inputs of the graph, and every block that
    shares the graph would compute by these parts.
    """
    if torch.compiler.is_compiling() or not _WAITING or not y.requires_grad:
        return y
    first = _WAITING.get(part)
    if first is not None:
        y.register_hook(first.seen)
    return y


@dataclass(frozen=True)
class Converted:
    """A module that computes by the recipe. `name` is its role's, `shape` its weight's, [N, K]; `formats` has the text
    of each tensor's quantizer as it is now."""

    name: str
    kind: str
    shape: tuple[int, ...]
    formats: Mapping[str, str]


@dataclass(frozen=True)
class Skipped:
    """A module with products that was not converted, or whose weight is not held quantized, and why."""

    name: str
    shape: tuple[int, ...]
    why: str
    multiply_adds: int = field(default=0, repr=False)
    """models.kinds.multiply_adds of the module."""


@dataclass(frozen=True)
class Part:
    """A part of a converted module."""

    kind: str
    shape: tuple[int, ...]
    module: QuantizedModule
    multiply_adds: int = 0
    """The multiply-adds of its product by the weight; 0 without one."""

    @property
    def is_quantized(self) -> bool:
        """Whether a slot of it is in low precision now."""
        return any(is_low(getattr(self.module.quantizers, t)) for t in TENSOR_TYPES[self.module.module_type])

    @property
    def converted(self) -> Converted:
        texts = {t: str(getattr(self.module.quantizers, t)) for t in TENSOR_TYPES[self.module.module_type]}
        return Converted(self.module.name, self.kind, self.shape, texts)


@dataclass(repr=False)
class Conversion:
    """The result of convert(). It keeps no parameter and no module of the model alive.

    `share` is the converted part of the model's multiplications by weights, from 0 to 1. `quantized_share` is the part
    with an operand in low precision now. Each is a quotient: multiply-adds of these modules over multiply-adds of all
    converted and skipped modules. A module counts the multiply-adds for one row of its input, which equal the elements
    of its weights (models.kinds.multiply_adds). Rows of all modules count alike. Not counted are products without
    weights, as in attention, products with parameters that a forward does not own, and backward's products, which are
    equally many for each weight.
    """

    parts: list[Part] = field(default_factory=list, repr=False)
    skipped: list[Skipped] = field(default_factory=list)
    tied: list[tuple[str, str]] = field(default_factory=list)
    """The pairs of names that share a parameter."""
    plain: list[Skipped] = field(default_factory=list)
    """The converted modules whose weights stayed plain inside quantized_model_init, by the names of their roles, and
    why."""
    scheduled: bool = False
    """Whether the recipe changes later in a training."""

    @property
    def share(self) -> float:
        """The part of the model's multiplications by weights that was converted."""
        return self._share(self.parts)

    @property
    def quantized_share(self) -> float:
        """The part of the model's multiplications by weights with an operand in low precision, as it is now."""
        return self._share([part for part in self.parts if part.is_quantized])

    def _share(self, parts: Sequence[Part]) -> float:
        whole = sum(one.multiply_adds for one in (*self.parts, *self.skipped))
        return sum(part.multiply_adds for part in parts) / whole if whole else 0.0

    @property
    def modules(self) -> list[Converted]:
        """Each module that was converted, in order, with its formats as they are now."""
        return [part.converted for part in self.parts]

    def unused(self) -> list[str]:
        """The names of converted modules that our code has computed nothing for since convert() or reset(): they were
        not called, or something reads their weights without calling their forward."""
        return [part.module.name for part in self.parts if not was_called(part.module)]

    def reset(self) -> None:
        """Have unused() count from now on."""
        for part in self.parts:
            forget_call(part.module)

    def state_dict(self) -> dict[str, Any]:
        """The states of delayed scaling, "NAME.states.input_rowwise.history" and so on, which are not in the model's
        own state_dict; empty for recipes without any."""
        return {
            f"{part.module.name}.{key}": value for part in self.parts for key, value in part.module.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the states of state_dict(); modules without an entry begin anew. UserError for states of modules that
        are not converted, and then nothing is changed."""
        left, own = set(state), []
        for part in self.parts:
            prefix = f"{part.module.name}.states."
            own.append(
                {key.removeprefix(f"{part.module.name}."): v for key, v in state.items() if key.startswith(prefix)}
            )
            left -= {f"{part.module.name}.{key}" for key in own[-1]}
        if left:
            raise UserError(
                f"Conversion.load_state_dict: {min(left)} belongs to no converted module; convert the model by the"
                " filter and recipe of the checkpoint"
            )
        with torch.no_grad():
            for part, states in zip(self.parts, own, strict=True):
                part.module.load_state_dict(states, strict=False)

    def rows(self) -> list[dict[str, Any]]:
        """The name, kind, shape and why of every module, converted ones first; `why` is empty for these, and each
        tensor's format for the others."""
        converted = [{"name": m.name, "kind": m.kind, "shape": m.shape, **m.formats, "why": ""} for m in self.modules]
        return converted + [{"name": s.name, "kind": "skipped", "shape": s.shape, "why": s.why} for s in self.skipped]

    def frame(self) -> Any:
        """rows() as a pandas.DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows()).fillna("")

    def __str__(self) -> str:
        kinds = [part.kind for part in self.parts]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        text = f"converted {counted}{self._shares()}"
        text += f"; skipped {_reasons(self.skipped)}" if self.skipped else ""
        return text + (f"; plain weights of {_reasons(self.plain)}" if self.plain else "")

    def _shares(self) -> str:
        """How much of the model was converted, and whether anything is quantized."""
        any_weight = any(part.multiply_adds for part in self.parts)
        of_model = f", {_percent(self.share)} of the model's multiplications by weights" if any_weight else ""
        if not any(part.is_quantized for part in self.parts):
            return f"{of_model}; nothing is quantized" + (" before the recipe changes" if self.scheduled else "")
        same = not any_weight or self.quantized_share == self.share
        return of_model + ("" if same else f" ({_percent(self.quantized_share)} are quantized)")

    def __repr__(self) -> str:
        return f"<Conversion: {self}>"

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self))}</p>{self.frame().to_html(index=False)}"


def _percent(share: float) -> str:
    """The share in %, which is 100 or 0 for the whole and for nothing alone."""
    return f"{min(max(round(100 * share, 1), 0.1), 99.9) if 0 < share < 1 else 100 * share:.3g} %"


def _reasons(skipped: Sequence[Skipped]) -> str:
    """Each reason, the first name that has it, and the number of others."""
    first: dict[str, list[str]] = {}
    for module in skipped:
        first.setdefault(module.why, []).append(module.name)
    return "; ".join(
        names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") + f" ({why})"
        for why, names in first.items()
    )
