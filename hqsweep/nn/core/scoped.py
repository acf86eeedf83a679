"""Scoped: a value for the innermost `with`, visible to autograd's own threads.

On CUDA, backward and the recomputations of torch.utils.checkpoint run in threads of the autograd engine. A thread
without a value of its own therefore reads the value entered last in any thread. With one training per process, that is
the value of the thread that called backward.
"""

from contextlib import ContextDecorator
from dataclasses import dataclass
from threading import Lock, local
from typing import Generic, TypeVar

import torch

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
