"""The context of a forward pass: the key of stochastic rounding, a probe on sampled steps, a recipe.

The context is a value of the innermost `with` (Scoped). On CUDA, backward and the recomputations of
torch.utils.checkpoint run in threads of the autograd engine. A thread without a value of its own therefore reads the
value entered last in any thread. With one training per process, that is the value of the thread that called backward.

A recomputed part of a model keeps only its inputs, and runs again in backward, under the same context.
torch.utils.checkpoint, reentrant or not, gives the same bytes as no checkpoint for every module here. Nothing draws
from a generator's state, since random bits are keyed by seed, slot, step and index. Saving has no side effects, and
modules keep no state between calls that would change a second run. torch's functions recompute under the autocast() and
quantization() of the backward pass, which therefore must run inside them. A module refuses a second run elsewhere if it
would give other bytes.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock, local
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
import torch.compiler.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, RngNumbers, numbers_of
from hqsweep.memo import memo
from hqsweep.nn.core.probe import Probe
from hqsweep.ops.library import has_kernels
from hqsweep.ops.quantize.nonfinite import boundary
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import Section

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class _Entry(Generic[Value]):
    """One `with`. Entries are compared by identity."""

    value: Value


class _Own(local):
    """The innermost entry of each thread.

    torch.compile can trace an attribute of a thread-local, but not a context variable. torch 2.11 would read a class
    attribute instead of the thread's, so there is none.
    """

    def __init__(self) -> None:
        self.entry: _Entry | None = None


class Scoped(Generic[Value]):
    """A value for a `with`; `outside` is the value if no thread has entered one.

    Leaving restores the previous value, also after an exception.
    """

    def __init__(self, outside: Value) -> None:
        self.outside = outside
        self._own = _Own()
        self._entered: tuple[_Entry[Value], ...] = ()  # of all threads, in order; replaced, never mutated
        self._lock = Lock()

    def get(self) -> Value:
        """Return the value of this thread's innermost `with`, else the last one entered in any thread, else
        `outside`."""
        own, entered = self._own.entry, self._entered
        if own is not None:
            return own.value
        return entered[-1].value if entered else self.outside

    def entered(self, value: Value) -> "Entered[Value]":
        """Return a context, or decorator, inside which get() returns this value."""
        return Entered(self, value)

    def enter(self, value: Value) -> tuple[_Entry[Value], _Entry[Value] | None]:
        """Begin a `with`, and return leave()'s arguments: its entry, and this thread's previous entry."""
        entry, before = _Entry(value), self._own.entry
        self._own.entry = entry
        if not torch.compiler.is_compiling():  # a trace has one thread
            with self._lock:
                self._entered += (entry,)
        return entry, before

    def leave(self, entry: _Entry[Value], before: _Entry[Value] | None) -> None:
        """End a `with`: restore the state before enter()."""
        self._own.entry = before
        if not torch.compiler.is_compiling():
            with self._lock:
                self._entered = tuple([e for e in self._entered if e is not entry])


class Entered(ContextDecorator, Generic[Value]):
    """One `with`, or one decorated function. Each call of the function enters and leaves the context."""

    def __init__(self, scoped: Scoped[Value], value: Value) -> None:
        self._scoped, self._value = scoped, value

    def __enter__(self) -> None:
        self._entry = self._scoped.enter(self._value)

    def __exit__(self, *raised: object) -> None:
        self._scoped.leave(*self._entry)

    def _recreate_cm(self) -> "Entered[Value]":
        return Entered(self._scoped, self._value)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The state that each module captures in forward, so that backward and recomputations draw the same bits."""

    seed: int = 0
    step: int | None = None
    """The step of the training; None without a training."""
    turn: int | None = None
    """The number that delayed scaling takes for the step where there is none; each autocast of hqsweep.compat has
    one."""
    probe: Probe | None = None
    microbatch: int = 0
    cache_weights: bool = False
    """Whether linears keep the operands of their weights for later calls."""
    period: object = field(default=None, compare=False)
    """An object for a period in which torch's version counter sees all writes to weights; None: they are compared."""
    amax_group: Any = None
    """The process group whose ranks share the amaxes of delayed scaling; None: all ranks."""
    counter: Tensor | None = field(default=None, compare=False)
    """int64 [1] on the device: the step, which keys read there. None: keys have `step`."""
    kernels: bool = True
    """Whether norms, activations, rotary positions and the loss run on hqsweep's CUDA kernels, if the build has
    them."""
    reader: Callable[[Any, str, Any, Any], None] | None = field(default=None, compare=False)
    """Called with the call, the GEMM and both operands of each product of LinearCall.product.

    Products then take codes, with the same values as the exact operands that they usually take.
    """

    owners: dict[Hashable, ref] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Which module draws the random bits of a slot."""

    def claim(self, slot: tuple, module: object) -> None:
        """Note that the module draws the random bits of the slot (module type, name, expert).

        UserError if another module draws them, whose bits would be the same.
        """
        owner = self.owners.get(slot)
        owner = owner and owner()
        if owner is None:
            self.owners[slot] = ref(module)
        elif owner is not module:
            raise UserError(
                f"{slot[1]}: two modules ({slot[0]}) of this name round stochastically in one step and would draw the"
                " same random bits; give each a name of its own, or run each in a quantization() of its own"
            )

    def key(self, slot: str) -> RngKey:
        return RngKey(slot=slot, **self._key_fields())

    def numbered_key(self, numbers: list[int]) -> RngNumbers:
        """Return key() of the slot with these numbers (numbers_of)."""
        return RngNumbers(numbers=numbers, **self._key_fields())

    def _key_fields(self) -> dict[str, Any]:
        # TorchInductor records a CUDA graph for each number that one takes: a trace with a counter takes none.
        read = self.counter is not None and torch.compiler.is_compiling()
        step = 0 if self.step is None or read else self.step
        return {"seed": self.seed, "step": step, "counter": self.counter}


OUTSIDE = Context()
"""The result of current() outside quantization()."""

_CONTEXT = Scoped(OUTSIDE)
_RECIPE: Scoped[AnyRecipe | None] = Scoped(None)

# torch.compile takes numbers of global variables and of modules for constants, and would trace a graph for every step,
# and for the slots of random bits of every module.
_DYNAMIC = torch.compiler.config.dynamic_sources
torch.compiler.config.dynamic_sources = ",".join(
    [*([_DYNAMIC] if _DYNAMIC else []), ".*_CONTEXT.*value[.](step|turn)", ".*_slot_numbers.*"]
)


def current() -> Context:
    """Return the innermost context. Outside quantization(): seed 0, random bits of step 0, no probe."""
    return _CONTEXT.get()


def autocast_recipe() -> AnyRecipe | None:
    """Return the recipe of the innermost autocast; None outside autocast."""
    return _RECIPE.get()


def use_kernels(x: Tensor) -> bool:
    """Return whether elementwise work on x runs on hqsweep's CUDA kernels.

    It does on a GPU, if the build has them, unless quantization() has kernels=False. Otherwise torch's operators
    compute it, which are the reference.
    """
    return x.is_cuda and _CONTEXT.get().kernels and has_kernels("cuda")


def quantization(
    *,
    seed: int = 0,
    step: int | None = None,
    probe: Probe | None = None,
    microbatch: int = 0,
    cache_weights: bool = False,
    amax_group: Any = None,
    counter: Tensor | None = None,
    kernels: bool = True,
) -> Entered[Context]:
    """Set the key of random bits, the probe and the step for the modules that are called inside.

    Random bits are drawn from (seed, slot, step, microbatch). All microbatches under one step are one step of delayed
    scaling.

    step: the step of the training; by default bits are drawn as in step 0.
    microbatch: index of a part of the step's batch. Weights draw without it, since they are the same for all parts.
    cache_weights: quantize a weight once a step, for microbatches, evaluation and backward, until the weight is
    written. It needs the step. It costs 2 bytes an element and direction, and a copy of the weight, which each use
    compares.
    amax_group: the process group whose largest amaxes delayed scaling takes; by default all ranks. Where ranks hold
    different experts, give the group of ranks with the same experts.
    counter: int64 [1] on the device. Random bits take the step from it, when they are drawn, in place of `step`. A
    captured CUDA graph then draws the bits of every step: write the step to it before each replay.
    kernels: whether norms, activations, rotary positions and the loss run on hqsweep's CUDA kernels. With False torch's
    operators run, which sum in another order.
    """
    options = {"probe": probe, "microbatch": microbatch, "cache_weights": cache_weights, "amax_group": amax_group}
    options |= {"counter": counter, "kernels": kernels}
    if cache_weights and step is None:
        raise UserError("quantization: cache_weights keeps operands for one step of the training; pass step=, too")
    if counter is not None and (counter.dtype != torch.int64 or counter.numel() != 1):
        raise UserError(
            f"quantization: counter is {counter.dtype} {tuple(counter.shape)}; it takes int64 [1], which holds the step"
        )
    if not torch.compiler.is_compiling():
        boundary()
    return _CONTEXT.entered(Context(seed=seed, step=step or 0, **options))


@contextmanager
def autocast(
    enabled: bool = True, *, recipe: AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Modules called inside run on `recipe` instead of their own; the innermost autocast decides.

    recipe: as modules take it. A format ("format:nvfp4"), or the section of a linear, applies to all products.
    enabled=False is high precision (bf16 operands). Backward needs no autocast; recomputation in backward does.
    """
    if enabled and recipe is None:
        raise UserError("autocast: recipe is missing; give a Recipe or a CustomRecipe, or enabled=False")
    with _RECIPE.entered(as_recipe(recipe, "autocast").entered() if enabled else high_precision()):
        yield


@memo
def high_precision() -> AnyRecipe:
    """Return the recipe of autocast(enabled=False): bf16 operands."""
    return as_recipe("format:bf16", "autocast")


def as_recipe(recipe: AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any], where: str) -> AnyRecipe:
    """Return a recipe as it is; make one from any other argument that modules take (recipe.argument.whole_recipe)."""
    if hasattr(recipe, "resolve"):
        return recipe
    from hqsweep.recipe.argument import whole_recipe  # the parser of recipes is not for every call

    return whole_recipe(recipe, where)


def within(context: Context) -> Entered[Context]:
    """Call modules inside in this context. Names of modules are claimed anew."""
    return _CONTEXT.entered(context)


def unwritten(period: object) -> Entered[Context]:
    """Inside, kept operands of weights are used without a comparison of the weights, for all `with` blocks of one
    period.

    The caller promises that torch's version counter sees every write to a weight in that period.
    """
    return within(replace(current(), period=period))


@contextmanager
def replayed(context: Context, recipe: AnyRecipe | None) -> Iterator[None]:
    """Restore an earlier current() and autocast_recipe(), so that a recomputation draws the same bits."""
    with _CONTEXT.entered(context), _RECIPE.entered(recipe):
        yield


SlotNumbers = Mapping[str, list[list[int]]]
"""Slot numbers for a module's random bits. A trace takes them as inputs; names would be guards of the trace.

Tensor of a module -> numbers_of() its slot, for each of the first NUMBERED_PARTS microbatches.

They are lists, because torch.compile treats tuples of numbers as constants.
"""
NUMBERED_PARTS = 8
"""The number of microbatches that SlotNumbers covers."""


def slot_numbers(module_type: str, name: str) -> SlotNumbers:
    """Return the slot numbers of a module without experts."""
    slots = {tensor: str(QuantizerRole(module_type, tensor, name)) for tensor in TENSOR_TYPES[module_type]}
    parts = ["", *(f"@{part}" for part in range(1, NUMBERED_PARTS))]
    return {tensor: [numbers_of(f"{slot}{part}") for part in parts] for tensor, slot in slots.items()}


Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])


def recomputed(function: Callable[..., Outputs], *args: object) -> Outputs:
    """Return function(*args) by torch.utils.checkpoint without reentry, under this call's quantization() and
    autocast().

    So backward may run outside both. function: a module or a closure over modules that does not draw from torch's
    generators. Tensors in args are kept until backward.
    """
    if torch.compiler.is_compiling():  # it takes no context_fn, and traces both contexts
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    context, recipe = current(), autocast_recipe()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), replayed(context, recipe)

    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
