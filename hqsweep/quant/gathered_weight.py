"""GatheredWeight: a plain weight that torch's fully_shard has gathered in the dtype of its linear.

A bfloat16 linear rounds its float32 weight to bfloat16 before it quantizes, so gathering bfloat16 values is enough. The
parameter stays a float32 tensor with float32 gradients; only its values are rounded.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

from hqsweep.errors import UserError
from hqsweep.torch_private import (
    disabled_torch_function,
    make_wrapper_subclass,
    schema_of,
    to_copy,
    tree_map,
    unsafe_view,
)

aten = torch.ops.aten


class GatheredWeight(torch.Tensor):
    """A read-only tensor of `dtype` whose values are those of `value`, a tensor of a narrower dtype.

    gathering: fills and frees the memory of `value` (a Gathering, shared by views); None while torch.compile traces,
    when the memory is there.
    """

    value: Tensor
    gathering: Any

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, value: Tensor, dtype: torch.dtype, gathering: Any = None) -> "GatheredWeight":
        self = make_wrapper_subclass(cls, value.shape, dtype=dtype, device=value.device)
        self.value, self.gathering = value, gathering
        return self

    def filled(self) -> Tensor:
        """`value`, with its memory filled. A collective where it was freed."""
        if self.gathering is not None:
            self.gathering.fill()
        return self.value

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["value"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "GatheredWeight":
        return GatheredWeight(inner["value"], dtype)

    def _stable_hash_for_caching(self) -> str:
        return stable_hash(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, cls) and func in _VIEWS:
            viewed = func(first.value, *args[1:], **kwargs)
            return tree_map(lambda value: cls(value, first.dtype, first.gathering), viewed)
        if isinstance(first, cls) and func in _LIKE:
            return func(torch.empty_like(first.value, dtype=first.dtype, device="meta"), **_placed(first, kwargs))
        if isinstance(first, cls) and schema_of(func).is_mutable:
            raise UserError(
                "a weight that fully_shard has gathered cannot be written; write the shards, outside of forward and"
                " backward"
            )
        if func is to_copy.default and kwargs.get("dtype") is not None:
            return func(first.filled(), **kwargs)
        args, kwargs = tree_map(lambda x: x.filled().to(x.dtype) if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GatheredWeight({list(self.shape)}, dtype={self.dtype}, values in {self.value.dtype})"


def stable_hash(x: Any) -> str:
    """A hash of the metadata of a traceable tensor, equal in all processes."""
    names, metadata = x.__tensor_flatten__()
    inner = [(name, t.dtype, t.device, t.shape, t.stride(), t.storage_offset()) for name, t in _inner(x, names)]
    described = repr((type(x).__name__, x.shape, x.dtype, x.requires_grad, metadata, inner))
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _inner(x: Any, names: list[str]) -> list[tuple[str, Tensor]]:
    return [(name, getattr(x, name)) for name in names]


def _placed(x: GatheredWeight, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "device": options.get("device") or x.device}


_VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.view.default,
    unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.unbind.int,
    aten.t.default,
    aten.transpose.int,
}
_LIKE = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default}
