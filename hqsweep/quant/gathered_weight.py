"""GatheredWeight: the whole of a plain weight, as torch's fully_shard gathers it in the dtype of its linear.

A float32 weight of a bfloat16 linear is rounded to bfloat16 before it is quantized, so nothing more has to travel. The
parameter stays one of float32, which takes float32 gradients; only the values that it has are rounded.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hqsweep.errors import UserError

aten = torch.ops.aten


class GatheredWeight(torch.Tensor):
    """A tensor of `dtype` whose values are those of `value`, in a narrower one; neither can be written.

    gathering: what fills and frees the memory of `value` (Gathering); views share it. None inside a
    trace, where the memory is there.
    """

    value: Tensor
    gathering: Any

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor, dtype: torch.dtype, gathering: Any = None) -> "GatheredWeight":
        self = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=dtype, device=value.device)
        self.value, self.gathering = value, gathering
        return self

    def filled(self) -> Tensor:
        """`value`, whose memory is there; a collective where it was given up."""
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
        if isinstance(first, cls) and func._schema.is_mutable:
            raise UserError(
                "a weight that fully_shard has gathered cannot be written; write the shards, outside of forward and"
                " backward"
            )
        if func is aten._to_copy.default and kwargs.get("dtype") is not None:
            return func(first.filled(), **kwargs)
        args, kwargs = tree_map(lambda x: x.filled().to(x.dtype) if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GatheredWeight({list(self.shape)}, dtype={self.dtype}, values in {self.value.dtype})"


def stable_hash(x: Any) -> str:
    """A hash of what a traceable tensor is made of, but for values: equal in all processes."""
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
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.unbind.int,
    aten.t.default,
    aten.transpose.int,
}
_LIKE = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default}
