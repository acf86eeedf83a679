"""Blank: what torch's fully_shard makes by new_zeros and then fills with a rank's shard.

It pads shards to one size: new_zeros(shape of the first), narrow to its own rows, copy_. A quantized shard cannot
be written into zeros, of which blocks lie elsewhere, so this tensor becomes the shard that is copied into it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import disabled_torch_function, make_wrapper_subclass, pin_memory, to_copy, tree_map

aten = torch.ops.aten


class Blank(torch.Tensor):
    """Zeros of the shape of a shard, padded, of the tensor `like`, which has a sharding; all views become the shard
    that is copied into one of them. Any other use is one of zeros in like's formats."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, like: HybridQuantizedTensor, shape: Any, held: list, **options: Any) -> "Blank":
        self = make_wrapper_subclass(cls, torch.Size(shape), **options)
        self.like, self.held = like, held
        return self

    def view_as_shape(self, shape: Any) -> "Blank":
        """A view of another shape."""
        return Blank(self.like, shape, self.held, dtype=self.dtype, device=self.device)

    def value(self) -> Tensor:
        """What it is where it is no shard in the making."""
        if not self.held:
            like, meta = self.like, self.like.metadata
            options = {"dtype": self.dtype, "source_dtype": meta.source_dtype, "directions": meta.directions}
            zeros = type(like).empty(self.shape, like.quantizer, device=self.device, **options)
            zeros.quantize_(torch.zeros(self.shape, dtype=self.dtype, device=self.device), key=meta.key)
            self.held.append(zeros)
        return self.held[0]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if isinstance(args[0], cls) and func in _HANDLERS:
            return _HANDLERS[func](*args, **(kwargs or {}))
        args, kwargs = tree_map(lambda x: x.value() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _view(x: Blank, size: list[int]) -> Blank:
    return x.view_as_shape(torch.empty(x.shape, device="meta").view(size).shape)


def _slice(x: Blank, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    (start, stop, step), cut = slice(start, end, step).indices(x.shape[dim]), x.like.sharding.cut
    if (dim, start, step) != (cut.dim, 0, 1):
        return x.value()[(slice(None),) * dim + (slice(start, stop, step),)]
    if x.held and x.held[0].shape[dim] == stop:
        return x.held[0].detach()
    return _empty_shard(x) if stop == 0 else x.view_as_shape(cut.shape_of(stop))


def _empty_shard(x: Blank) -> HybridQuantizedTensor:
    like, cut = x.like, x.like.sharding.cut
    end = cut.shape[cut.dim]
    metadata = replace(cut.part(end, end), dtype=x.dtype, key=like.metadata.key)
    shard = type(like)(metadata.empty(x.device), metadata, cut.shape_of(0))
    shard.sharding, shard.states, shard.part = like.sharding, like.states, like.part
    if like.shape == shard.shape:  # it is that shard, which is padded: torch copies nothing of it
        shard.shared = like.shared
    return shard


def _copy_(x: Blank, source: Tensor, non_blocking: bool = False) -> Blank:
    if isinstance(source, HybridQuantizedTensor) and source.sharding is x.like.sharding and source.shape == x.shape:
        shard = source.clone()
        shard.states = source.states
        shard.shared = source.shared  # as ranks keep theirs whose shards are not padded: it remembers an exchange
        x.held[:] = [shard]
    else:
        x.value().copy_(source)
    return x


def _moved(func: Any) -> Any:
    def move(x: Blank, *args: Any, **options: Any) -> Blank:
        held = [func(value, *args, **options) for value in x.held]
        device = options.get("device") or x.device
        return Blank(x.like, x.shape, held, dtype=options.get("dtype") or x.dtype, device=device)

    return move


_HANDLERS = {
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.copy_.default: _copy_,
    aten.detach.default: lambda x: x.view_as_shape(x.shape),
    to_copy.default: _moved(to_copy.default),
    pin_memory.default: _moved(pin_memory.default),
}
