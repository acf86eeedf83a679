"""Scoped: a value of the innermost `with`, which autograd's own threads see too.

On CUDA backward runs in threads of the autograd engine, and with it what torch.utils.checkpoint computes again. Context
variables have their defaults there. A thread without a value of its own therefore reads the value that was entered last
in any thread; with one training in a process, that is the one of the thread that called backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class _Entry(Generic[Value]):
    """One `with`; two of them are equal only if they are the same."""

    value: Value


class Scoped(Generic[Value]):
    """`outside` is the value where no thread has entered any. Leaving restores, also by an exception."""

    def __init__(self, name: str, outside: Value) -> None:
        self.outside = outside
        self._own: ContextVar[_Entry[Value] | None] = ContextVar(name, default=None)
        self._entered: tuple[_Entry[Value], ...] = ()  # of all threads, in order; replaced as a whole
        self._lock = Lock()

    def get(self) -> Value:
        """The value of this thread's innermost `with`, else the last one entered anywhere, else `outside`."""
        own, entered = self._own.get(), self._entered
        if own is not None:
            return own.value
        return entered[-1].value if entered else self.outside

    @contextmanager
    def entered(self, value: Value) -> Iterator[None]:
        """What get() gives inside."""
        entry = _Entry(value)
        token = self._own.set(entry)
        with self._lock:
            self._entered += (entry,)
        try:
            yield
        finally:
            self._own.reset(token)
            with self._lock:
                self._entered = tuple(e for e in self._entered if e is not entry)
