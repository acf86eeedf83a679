"""Which converted modules our code has computed for, eagerly or in a compiled graph."""

import torch

from hqsweep.memo import constant_result
from hqsweep.nn.core.module import QuantizedModule
from hqsweep.torch_private import dynamo_output

CALLED = "called"
"""The attribute of a part that says whether our code computed its product since it was made, or since forget_call()."""


def note_call(part: QuantizedModule) -> None:
    """Note that our code computes a product of this part.

    A compiled graph notes it whenever it runs, but for the body of an operator of higher order, such as
    torch.utils.checkpoint, which may write to nothing: there it is noted once, by the trace.
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
