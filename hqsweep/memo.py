"""One cache for what is worked out once and asked for at every call, in eager mode and under torch.compile."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

F = TypeVar("F", bound=Callable)
LIMIT = 8192
"""Results that a function keeps; when it has more, it starts again with none."""


def constant_result(function: F) -> F:
    """torch.compiler.assume_constant_result without importing torch._dynamo, which is as slow as importing torch."""
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
