"""Scoped: a value of the innermost `with`, which autograd's own threads see too.

On CUDA backward runs in threads of the autograd engine, and with it what torch.utils.checkpoint computes again. A
thread without a value of its own therefore reads the value that was entered last in any thread; with one training in a
process, that is the one of the thread that called backward.
"""

from contextlib import ContextDecorator
from dataclasses import dataclass
from threading import Lock, local
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class _Entry(Generic[Value]):
    """One `with`; two of them are equal only if they are the same."""

    value: Value


class _Own(local):
    """The innermost entry of each thread. torch.compile traces the attribute of a thread, but no context variable; an
    attribute of the class would hide the thread's from that of torch 2.11."""

    def __init__(self) -> None:
        self.entry: _Entry | None = None


class Scoped(Generic[Value]):
    """A value for a `with`; `outside` is the value where no thread has entered any. Leaving restores the value before,
    also after an exception."""

    def __init__(self, outside: Value) -> None:
        self.outside = outside
        self._own = _Own()
        self._entered: tuple[_Entry[Value], ...] = ()  # of all threads, in order; replaced as a whole
        self._lock = Lock()

    def get(self) -> Value:
        """The value of this thread's innermost `with`, else the last one entered anywhere, else `outside`."""
        own, entered = self._own.entry, self._entered
        if own is not None:
            return own.value
        return entered[-1].value if entered else self.outside

    def entered(self, value: Value) -> "Entered[Value]":
        """A context, or a decorator, inside which get() gives this value."""
        return Entered(self, value)

    def enter(self, value: Value) -> tuple[_Entry[Value], _Entry[Value] | None]:
        """Begin a `with`; returns the arguments of leave(): its entry and this thread's entry before."""
        entry, before = _Entry(value), self._own.entry
        self._own.entry = entry
        if not torch.compiler.is_compiling():  # a trace has one thread
            with self._lock:
                self._entered += (entry,)
        return entry, before

    def leave(self, entry: _Entry[Value], before: _Entry[Value] | None) -> None:
        """End a `with`: restore what was before enter()."""
        self._own.entry = before
        if not torch.compiler.is_compiling():
            with self._lock:
                self._entered = tuple([e for e in self._entered if e is not entry])


class Entered(ContextDecorator, Generic[Value]):
    """One `with`, or one function, each of whose calls is a `with` of its own."""

    def __init__(self, scoped: Scoped[Value], value: Value) -> None:
        self._scoped, self._value = scoped, value

    def __enter__(self) -> None:
        self._entry = self._scoped.enter(self._value)

    def __exit__(self, *raised: object) -> None:
        self._scoped.leave(*self._entry)

    def _recreate_cm(self) -> "Entered[Value]":
        return Entered(self._scoped, self._value)
