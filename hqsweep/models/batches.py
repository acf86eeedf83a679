"""Batches of any kind, such as images with labels, and the loss of a model on them.

The training loop shares out, moves and captures tensors whose first axis counts samples. A batch of any nest of tensors
travels as one of them: a row of bytes for each sample (Packing). The loss takes it apart again (BatchLoss). So ranks,
microbatches and CUDA graphs serve every model.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.errors import UserError

Batch = Any
"""A tensor [B, ...], or a mapping, list or tuple of batches."""
Loss = tuple[Tensor, Tensor | None]
ATTRIBUTE = "_hqsweep_loss"
BATCHES = (
    "it must have a method loss(batch), take the batch's fields and give a loss (Hugging Face's with labels), or give"
    " logits [B, ..., classes] for a batch (inputs, int64 targets [B, ...]); else name a function of model and batch by"
    " model.loss"
)


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor of a batch: its place as text, the shape of one sample, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The layout of batches as rows of bytes. like: a batch, whose nest all have."""

    like: Batch
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, batch: Batch) -> "Packing":
        """The layout of batches like this one. UserError for an entry without a tensor, or without a first axis."""
        leaves = []
        for name, value in _walk(batch, ""):
            if not isinstance(value, Tensor) or value.dim() == 0:
                came = "a number" if isinstance(value, Tensor) else type(value).__name__
                raise UserError(
                    f"data._target_: {name or 'a batch'} is {came}; samples are tensors, arrays and numbers"
                )
            leaves.append(Leaf(name=name, shape=tuple(value.shape[1:]), dtype=value.dtype))
        if not leaves:
            raise UserError("data._target_: a sample has no tensor; give samples with at least one")
        return cls(like=_map(batch, iter([None] * len(leaves))), leaves=tuple(leaves))

    def pack(self, batch: Batch) -> Tensor:
        """uint8 [B, bytes]. UserError for a batch with other fields, shapes or dtypes than the first one."""
        values = list(_walk(batch, ""))
        if [name for name, _ in values] != [leaf.name for leaf in self.leaves]:
            raise UserError("data._target_: samples have different fields; give every sample those of the first one")
        for leaf, (_, value) in zip(self.leaves, values, strict=True):
            if (tuple(value.shape[1:]), value.dtype) != (leaf.shape, leaf.dtype):
                came, first = _said(value.shape[1:], value.dtype), _said(leaf.shape, leaf.dtype)
                where = f"field {leaf.name} of a sample" if leaf.name else "a sample"
                raise UserError(f"data._target_: {where} is {came}, and of the first one {first}; pad or crop it")
        rows = len(values[0][1])
        return torch.cat([_bytes(value).view(rows, -1) for _, value in values], dim=1)

    def unpack(self, rows: Tensor) -> Batch:
        """The batch of uint8 [B, bytes]; on the meta device too."""
        values, start = [], 0
        for leaf in self.leaves:
            part = rows[:, start : start + leaf.nbytes].clone(
                memory_format=torch.contiguous_format
            )  # at an offset of 0
            values.append(part.view(leaf.dtype).view(len(rows), *leaf.shape))
            start += leaf.nbytes
        return _map(self.like, iter(values))

    def __str__(self) -> str:
        """The fields, such as pixel_values float32 [3, 8, 8], labels int64 []."""
        return ", ".join(f"{leaf.name} {_said(leaf.shape, leaf.dtype)}".strip() for leaf in self.leaves)


def described(batch: Batch) -> str:
    """The fields of a batch with their shapes, such as labels int64 [4]."""
    return ", ".join(f"{name} {_said(value.shape, value.dtype)}".strip() for name, value in _walk(batch, ""))


def _said(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(len(value), -1).view(torch.uint8)


def _walk(batch: Batch, name: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of every leaf, in order."""
    if isinstance(batch, Mapping):
        entries = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, list | tuple):
        entries = [(str(place), value) for place, value in enumerate(batch)]
    else:
        yield name, batch
        return
    for key, value in entries:
        yield from _walk(value, f"{name}.{key}" if name else key)


def _map(batch: Batch, values: Iterator[Any]) -> Batch:
    """The same nest of dicts, lists and tuples with other leaves."""
    if isinstance(batch, Mapping):
        return {key: _map(value, values) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return (
            [_map(value, values) for value in batch]
            if isinstance(batch, list)
            else tuple(_map(value, values) for value in batch)
        )
    return next(values)


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of a model that head_loss.model_loss calls in place of the loss of tokens.

    packing: the layout of the batches; None for tokens, whose batch is (tokens, targets), int64 [B, T] each. function:
    returns the loss of (model, batch); None: see batch_loss().
    """

    packing: Packing | None = None
    function: Callable[[nn.Module, Batch], Any] | None = None

    def attach(self, model: nn.Module) -> None:
        """Have model_loss() of this model compute this loss."""
        model.__dict__[ATTRIBUTE] = self

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Loss:
        """(loss, auxiliary loss or None), each []. inputs: uint8 [B, bytes], or tokens with their targets."""
        batch = (inputs, targets) if self.packing is None else self.packing.unpack(inputs)
        return batch_loss(model, batch, self.function)


def batch_loss(model: nn.Module, batch: Batch, function: Callable[[nn.Module, Batch], Any] | None = None) -> Loss:
    """(loss, auxiliary loss or None), each [], of a batch.

    The loss is, by the first that there is: function(model, batch); the method model.loss(batch); `.loss` of
    model(**batch), for a mapping; the cross entropy of model(inputs) for (inputs, int64 targets). A function or method
    may return a pair with an auxiliary loss. UserError for any other output.
    """
    own = getattr(model, "loss", None)
    if function is not None:
        return checked(function(model, batch), f"model.loss: {function.__qualname__}")
    if callable(own):
        return checked(own(batch), f"model: {type(model).__name__}.loss")
    if isinstance(batch, Mapping):
        out = model(**batch)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if not isinstance(loss, Tensor):
            raise UserError(f"model: {type(model).__name__} gave no loss for a batch of {', '.join(batch)}; {BATCHES}")
        return checked(loss, f"model: {type(model).__name__}")
    if isinstance(batch, list | tuple) and len(batch) == 2 and not _is_index(batch[1]):
        raise UserError(f"model: {type(model).__name__} has no loss for targets that are no int64 classes; {BATCHES}")
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UserError(f"model: {type(model).__name__} has no loss for a batch of {type(batch).__name__}; {BATCHES}")
    return _classes(model, *batch), None


def _is_index(targets: Any) -> bool:
    return isinstance(targets, Tensor) and targets.dtype is torch.int64


def _classes(model: nn.Module, inputs: Batch, targets: Tensor) -> Tensor:
    out = model(inputs)
    logits = getattr(out, "logits", out[0] if isinstance(out, tuple | list) and out else out)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape:
        came = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"model: {type(model).__name__} gave {came} for targets {tuple(targets.shape)}; {BATCHES}")
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def checked(out: Any, where: str) -> Loss:
    """The result of a user's loss, one number or two; UserError, which begins with `where`, for another result."""
    loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    for value in (loss, *(() if aux is None else (aux,))):
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            came = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{where} gave {came}; it must give a loss [], or that and an auxiliary loss []")
    return loss.reshape(()), None if aux is None else aux.reshape(())
