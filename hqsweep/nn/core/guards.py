"""Guards of modules: a recomputation computes the same as the first run, and products give right gradients.

Recomputation. torch.utils.checkpoint and similar tools keep a part's inputs and run it again in backward. The recipe,
quantization() and quantizers of that moment apply then. So a first run leaves a note, and the second run is compared
with it. The note lies with the keeper, the object that runs the part again. It is a frame of torch.utils.checkpoint.
For a first run without gradients it is the context of an autograd function: torch's use_reentrant=True, and the
functions of TransformerEngine, Megatron and DeepSpeed. So each second run finds the note of its first run, in any
order. Without a keeper, as for an unknown mechanism, the module's last call counts as the first run.

Products. torch.autocast would turn a float32 product of exact operands into bfloat16, in forward, and in a backward
that runs inside it. A backward with quantized operands is not differentiable: autograd would treat its tensors as
constants, and second derivatives would be wrong.

torch.compile of torch 2.11 silently gives zero gradients to the inputs of an autograd function in one case: the tensor
that forward returns was changed in place, or returned unchanged by .to(), so that one tensor is two nodes of the graph.
`returned` makes it a node of its own.
"""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import CodeType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hqsweep.errors import UserError
from hqsweep.memo import constant_result
from hqsweep.ops.library import in_backward
from hqsweep.recipe.sections import Section, slots
from hqsweep.torch_private import CHECKPOINT_FRAME, is_legacy_batched, top_saved_tensors_hooks

_NOTES = "_hqsweep_first_runs"
"""Attribute of a keeper: id of a module -> its first runs."""


class Run(NamedTuple):
    """Everything besides tensors that a call's results depend on."""

    quantizers: Section
    gemm: str
    in_autocast: bool
    """Whether autocast() gave the quantizers."""
    key: tuple[int, int | None, int]
    """Seed, step and microbatch."""
    counter: tuple[int, int] | None
    """The counter that replaces the step, and how often it was written."""
    kernels: bool
    epoch: int
    """How often the module has dropped states of delayed scaling."""

    def lost_by(self, other: "Run") -> list[str]:
        """Return what another run lacks of this one, if that changes its results: "autocast()", "recipe",
        "quantization()"."""
        delayed = any(quantizer is not None and quantizer.delayed for quantizer in slots(self.quantizers).values())
        same = self.quantizers == other.quantizers and self.gemm == other.gemm
        same = same and not (delayed and self.epoch != other.epoch)
        products = [] if same else ["autocast()" if self.in_autocast or other.in_autocast else "recipe"]
        keys = (self.quantizers.stochastic or delayed) and (self.key, self.counter) != (other.key, other.counter)
        return products + (["quantization()"] if keys or self.kernels != other.kernels else [])


def top_hooks() -> tuple[Any, Any] | None:
    """Return the innermost saved-tensor hooks, which now receive the tensors that autograd saves."""
    return top_saved_tensors_hooks(True)


class Runs:
    """The runs of one module."""

    def __init__(self) -> None:
        self.last: tuple | None = None
        """The Run fields of the last call outside a backward pass."""
        self._keepers: WeakSet[Any] = WeakSet()

    def note(self, module: object, fields: tuple) -> list[str]:
        """Leave a note of a run with its keepers. In backward, return what this run has lost of its first run, [] for
        nothing."""
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
        """Copies and pickles of a module start without runs."""
        return Runs, ()

    def are_awaited(self) -> bool:
        """Return whether a keeper exists that may run the module again."""
        return len(self._keepers) > 0


def refuse_second_runs(module: nn.Module, of: object, name: str, runs: Runs) -> None:
    """Make a module, which is plain now but was `of`, refuse recomputations of earlier quantized calls."""
    if not runs.are_awaited():
        return

    def refuse(*_: object) -> None:
        if in_backward() and any(id(of) in notes for notes in _notes_of_second_run()):
            raise refusal(name, ["recipe"])
        if not runs.are_awaited():
            hook.remove()

    hook = module.register_forward_pre_hook(refuse)


def refusal(name: str, lost: list[str]) -> UserError:
    """Return the error for a second run that has lost something of its first run."""
    return UserError(
        f"{name}: called within a backward pass, as torch.utils.checkpoint does, but outside of the"
        f" {' and '.join(lost)} that its last call ran in; run backward inside of it, or compute again by"
        " hqsweep.nn.recomputed"
    )


def _keepers() -> Iterator[Any]:
    """Yield the keepers of the present call."""
    hooks = top_hooks()
    for cell in getattr(hooks[0], "__closure__", None) or () if hooks is not None else ():
        if type(cell.cell_contents).__name__ == CHECKPOINT_FRAME:
            yield cell.cell_contents
    if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        yield from _callers("forward")


def _notes_of_second_run() -> Iterator[dict[int, list[Run]]]:
    """Yield the notes of the keepers that run the present call again."""
    for keeper in _callers("backward", "unpack_hook"):
        notes = keeper.__dict__.get(_NOTES)
        if notes is not None:
            yield notes


def _callers(*functions: str) -> Iterator[Any]:
    """Yield the running autograd contexts and checkpoint frames whose functions have these names, innermost first."""
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
    """Return the variable that holds a function's context or frame; None for unrelated functions."""
    if code.co_name == "unpack_hook":
        return "frame" if "frame" in code.co_freevars else None
    return code.co_varnames[0] if code.co_argcount and code.co_varnames[0] != "self" else None


Result = TypeVar("Result")


def in_autocast(device: torch.device) -> bool:
    """Return whether torch.autocast is on for this device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def outside_autocast(forward: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate forward(module, x, ...) so that torch's autocast is off on x's device."""

    @wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Result:
        x = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        if in_autocast(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return forward(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return run


def untraced(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function so that it runs eagerly under torch.compile.

    torch.compiler.disable would import torch._dynamo at once, which takes a second. During a trace it is imported
    already.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @constant_result
    def prepare() -> bool:
        if name not in _UNTRACED:
            _UNTRACED[name] = torch.compiler.disable(function)
        return True

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        if torch.compiler.is_compiling() and prepare():
            return _UNTRACED[name](*args, **kwargs)
        return function(*args, **kwargs)

    return run


_UNTRACED: dict[str, Callable[..., Any]] = {}


def refuse_transforms(name: str) -> None:
    """Raise UserError under transforms that replace products, since these read memory by address.

    A trace may be inside a transform.
    """
    if not torch.compiler.is_compiling():
        raise UserError(
            f"{name}: torch.func (grad, vjp, jvp, vmap, jacrev), forward-mode AD and is_grads_batched=True cannot look"
            " into quantized products; take torch.autograd, one gradient at a time, or revert the model first"
        )


def returned(y: Tensor) -> Tensor:
    """Return y as the forward of an autograd function should: as a view in a trace, else as it is."""
    return y.view_as(y) if torch.compiler.is_compiling() else y


def once_differentiable(backward: Callable[[Any, Tensor], Result]) -> Callable[[Any, Tensor], Result]:
    """Decorate backward(ctx, gradient) of a function with ctx.call: autocast is off, and create_graph=True raises
    UserError."""

    @wraps(backward)
    def run(ctx: Any, gradient: Tensor) -> Result:
        if not torch.compiler.is_dynamo_compiling() and is_legacy_batched(gradient):
            refuse_transforms(ctx.call.name)
        if torch.is_grad_enabled():
            raise UserError(
                f"{ctx.call.name}: create_graph=True asks for gradients of gradients; a quantized backward has none;"
                " leave it out, or take a module of torch.nn in this place"
            )
        if in_autocast(gradient.device):
            with torch.autocast(gradient.device.type, enabled=False):
                return backward(ctx, gradient)
        return backward(ctx, gradient)

    return run
