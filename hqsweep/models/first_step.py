"""Which converted modules have computed a product by our code, eagerly or in a compiled graph.

Modules that have computed nothing are named at the end of the first training step, in whatever loop it runs.
"""

import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from hqsweep.memo import constant_result
from hqsweep.nn.core.module import QuantizedModule
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
