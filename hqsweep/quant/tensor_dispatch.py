"""The effect of a torch operation on a quantized tensor: its handler (tensor_ops.py), or the rule for all others.

The rule: compute on dequantize(); quantize again what the operation wrote; return what it wrote as itself.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hqsweep.torch_private import schema_of, tree_map

HANDLERS: dict[Any, Callable] = {}
"""Operator -> the function that runs in its place, with the operator's own arguments."""


def implements(*operators: Any) -> Callable[[Callable], Callable]:
    """Register a handler for operators whose first argument is a quantized tensor."""

    def register(handler: Callable) -> Callable:
        HANDLERS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def dispatch(cls: type, func: Any, args: tuple, kwargs: dict) -> Any:
    """The result of an operator of which some argument is of the type cls."""
    if args and isinstance(args[0], cls):
        handler = args[0].handlers.get(func) or HANDLERS.get(func)
        if handler:
            return handler(*args, **kwargs)
    return _on_values(cls, func, args, kwargs)


def _on_values(cls: type, func: Any, args: tuple, kwargs: dict) -> Any:
    written: dict[int, tuple[Tensor, Any]] = {}

    def read(x: Any) -> Any:
        return x.dequantize() if isinstance(x, cls) else x

    def write(x: Any) -> Any:
        if not isinstance(x, cls):
            return x
        x.check_writable()
        preserved = x.high_precision_init_val
        values = x.dequantize() if preserved is None else preserved.to(x.device, x.dtype, copy=True)
        written[id(values)] = (values, x)
        return values

    def plain(argument: Any, value: Any) -> Any:
        writes = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        return tree_map(write if writes else read, value)

    schema = schema_of(func).arguments
    named = {argument.name: argument for argument in schema}
    plain_args = [plain(argument, value) for argument, value in zip(schema, args, strict=False)]
    plain_kwargs = {name: plain(named.get(name), value) for name, value in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for values, x in written.values():
        x.quantize_(values)
    return tree_map(lambda x: written[id(x)][1] if id(x) in written else x, result)
