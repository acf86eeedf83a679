"""What torch.compile is told of functions that it should not trace."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def constant_result(function: F) -> F:
    """torch.compiler.assume_constant_result less the import of torch._dynamo, which takes as long as torch's own."""
    function._dynamo_marked_constant = True
    return function
