"""Parts of a model that run again within backward: a module has to compute there what it computed the first time.

torch.utils.checkpoint and its like keep the inputs of a part and run it again, under the recipe, the quantization() and
the quantizers of that moment. A first run therefore leaves a note with whoever has the part run again, and a second run
is compared with it. The keeper of the note is a frame of torch.utils.checkpoint. For a first run without gradients it
is the context of an autograd function: torch's use_reentrant=True, and the functions of TransformerEngine, Megatron and
DeepSpeed. Each second run finds the note of its own first run, in any order. Without a keeper, as for an unknown
mechanism, the last call of the module stands in for the first run.
"""

import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from hqsweep.errors import UserError
from hqsweep.ops.library import in_backward
from hqsweep.recipe.sections import Section, slots

_NOTES = "_hqsweep_first_runs"
"""The attribute of whoever has a part run again: id of a module -> its first runs."""


class Run(NamedTuple):
    """What the results of a call depend on beside its tensors."""

    quantizers: Section
    gemm: str
    in_autocast: bool
    """Whether an autocast() gave the quantizers."""
    key: tuple[int, int | None, int]
    """The seed, the step and the microbatch."""
    counter: tuple[int, int] | None
    """The counter that stands for the step, and how often it was written."""
    kernels: bool
    epoch: int
    """How often the module has given up states of delayed scaling."""

    def lost_by(self, other: "Run") -> list[str]:
        """What of this call another one lacks, where it computes something else without."""
        delayed = any(quantizer is not None and quantizer.delayed for quantizer in slots(self.quantizers).values())
        same = self.quantizers == other.quantizers and self.gemm == other.gemm
        same = same and not (delayed and self.epoch != other.epoch)
        products = [] if same else ["autocast()" if self.in_autocast or other.in_autocast else "recipe"]
        keys = (self.quantizers.stochastic or delayed) and (self.key, self.counter) != (other.key, other.counter)
        return products + (["quantization()"] if keys or self.kernels != other.kernels else [])


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost hooks of saved tensors, which take what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


class Runs:
    """The runs of one module."""

    def __init__(self) -> None:
        self.last: tuple | None = None
        """The fields of the Run of the last call outside of a backward pass."""
        self._keepers: WeakSet[Any] = WeakSet()

    def note(self, module: object, fields: tuple) -> list[str]:
        """Leave a note of a run with whoever will have it run again. Returns what a second run, which this is within a
        backward pass, has lost of the first: nothing where it computes the same."""
        run, lost = Run(*fields), []
        if in_backward():
            first = [run for notes in _notes_of_second_run() for run in notes.get(id(module), ())]
            if not first and self.last is not None:
                first = [Run(*self.last)]
            each = [one.lost_by(run) for one in first]
            lost = [] if [] in each else each[0] if each else ["hqsweep.convert()"]
        else:
            self.last = fields
        for keeper in _keepers():
            notes = keeper.__dict__.setdefault(_NOTES, {})
            notes.setdefault(id(module), []).append(run)
            self._keepers.add(keeper)
        return lost

    def __reduce__(self) -> tuple[type["Runs"], tuple[()]]:
        """Copies and pickles of a module begin without runs."""
        return Runs, ()

    def are_awaited(self) -> bool:
        """Whether somebody is there who may have the module run again."""
        return len(self._keepers) > 0


def refuse_second_runs(module: nn.Module, of: object, name: str, runs: Runs) -> None:
    """Have a module, which computed as `of` and is plain now, refuse the second runs of what it computed then."""
    if not runs.are_awaited():
        return

    def refuse(*_: object) -> None:
        if in_backward() and any(id(of) in notes for notes in _notes_of_second_run()):
            raise refusal(name, ["recipe"])
        if not runs.are_awaited():
            hook.remove()

    hook = module.register_forward_pre_hook(refuse)


def refusal(name: str, lost: list[str]) -> UserError:
    """The error for a second run that has lost something of the first."""
    return UserError(
        f"{name}: called within a backward pass, as torch.utils.checkpoint does, but outside of the"
        f" {' and '.join(lost)} that its last call ran in; run backward inside of it, or compute again by"
        " hqsweep.nn.core.recompute.recomputed"
    )


def _keepers() -> Iterator[Any]:
    """Whoever will have the present call run again."""
    hooks = top_hooks()
    for cell in getattr(hooks[0], "__closure__", None) or () if hooks is not None else ():
        if type(cell.cell_contents).__name__ == "_CheckpointFrame":
            yield cell.cell_contents
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        yield from _callers("forward")


def _notes_of_second_run() -> Iterator[dict[int, list[Run]]]:
    """The notes of whoever has the present call run again."""
    for keeper in _callers("backward", "unpack_hook"):
        notes = keeper.__dict__.get(_NOTES)
        if notes is not None:
            yield notes


def _callers(*functions: str) -> Iterator[Any]:
    """The contexts of autograd functions, and the frames of torch.utils.checkpoint, whose functions of these names are
    under way, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        variable = _variable(code) if code.co_name in functions else None
        if variable is not None:
            value = frame.f_locals.get(variable)
            if variable == "frame" or isinstance(value, FunctionCtx):
                yield value
        frame = frame.f_back


def _variable(code: CodeType) -> str | None:
    """The variable of such a function that holds its context or frame; None for a function of something else."""
    if code.co_name == "unpack_hook":
        return "frame" if "frame" in code.co_freevars else None
    return code.co_varnames[0] if code.co_argcount and code.co_varnames[0] != "self" else None
