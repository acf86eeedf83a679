"""One cache for results that every call needs, in eager mode and under torch.compile."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable)
T = TypeVar("T")
LIMIT = 8192
"""Results that a function keeps; when it has more, it starts again with none."""


def constant_result(function: F) -> F:
    """torch.compiler.assume_constant_result without the import of torch._dynamo, which takes as long as torch's."""
    function._dynamo_marked_constant = True
    return function


def memo(function: F) -> F:
    """Return the first result again for equal positional arguments, which must be hashable.

    A dict in a plain function: torch.compile takes the result for a constant and does not trace the body, which it
    cannot promise for functools.lru_cache. `function.results` is the cache, for tests.
    """
    results: dict[tuple[Hashable, ...], object] = {}

    @constant_result
    @wraps(function)
    def cached(*args: Hashable):
        try:
            return results[args]
        except KeyError:
            if len(results) >= LIMIT:
                results.clear()
            result = results[args] = function(*args)
            return result

    cached.results = results
    return cached


class cached_property(Generic[T]):
    """functools.cached_property without its lock of Python 3.11, which torch.compile cannot trace.

    A trace keeps no result: an autograd Function must not write to earlier objects.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.__doc__ = make, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self
        results = instance.__dict__
        if self.name in results:
            return results[self.name]
        import torch

        result = self.make(instance)
        if not torch.compiler.is_compiling():
            results[self.name] = result
        return result
