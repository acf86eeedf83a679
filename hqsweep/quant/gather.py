"""Gather the codes and scales of an operand whose parts lie over the ranks of a group, in one collective of bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hqsweep.dist import words
from hqsweep.dist.collectives import begin_gather_bytes
from hqsweep.formats import WHOLE, Format
from hqsweep.quant.operand import Operand
from hqsweep.quant.part import Part

ALIGNED = 16
"""Bytes at a multiple of which each buffer begins in a message."""


def gather_operand(operand: Operand, axis: int, part: Part) -> Operand:
    """The operand of the whole, from those of every rank's part, cut along an axis of the operand, whose blocks no part
    cuts. Entries that cover that axis are equal on all ranks, and do not travel. A collective."""
    return begin_gather_operand(operand, axis, part)()


def begin_gather_operand(operand: Operand, axis: int, part: Part) -> Callable[[], Operand]:
    """gather_operand, begun: it goes on beside the work that follows, and the result waits (dist.tokens)."""
    sent = {name: _Sent.of(operand.buffers[name], axis) for name in cut_buffers(operand.format, axis)}
    pieces = [_padded(own.buffer.view(torch.uint8).flatten()) for own in sent.values()]
    arriving = begin_gather_bytes(torch.cat(pieces) if len(pieces) > 1 else pieces[0], part.group)
    shape = list(operand.shape)
    shape[axis] *= part.group.size()

    def result() -> Operand:
        arrived, buffers, start = arriving(), dict(operand.buffers), 0
        for (name, own), piece in zip(sent.items(), pieces, strict=True):
            buffers[name] = own.whole(arrived[:, start : start + own.buffer.nbytes], part.runs)
            start += len(piece)
        return replace(operand, buffers=buffers, shape=tuple(shape))

    return result


class _Sent(NamedTuple):
    """A buffer as it travels: in the order of its memory, which for values of high precision is that of X."""

    buffer: Tensor
    axis: int
    """The axis along which ranks have parts."""
    turned: bool
    """Whether it is the transpose of the operand's buffer."""

    @classmethod
    def of(cls, buffer: Tensor, axis: int) -> "_Sent":
        if not buffer.is_contiguous() and buffer.t().is_contiguous():
            return cls(buffer.t(), 1 - axis, True)
        return cls(buffer.contiguous(), axis, False)

    def whole(self, arrived: Tensor, runs: int) -> Tensor:
        """The operand's buffer, from the bytes [W, of a part] of all ranks."""
        rows, cols = self.buffer.shape
        parts = arrived.view(-1, rows, cols * self.buffer.element_size())
        whole = _whole(parts, self.axis, runs).view(self.buffer.dtype)
        return whole.t() if self.turned else whole


def cut_buffers(format: Format, axis: int) -> list[str]:
    """The buffers of which each rank has its own entries."""
    return [name for name, buffer in format.layout.items() if (buffer.rows, buffer.cols)[axis] != WHOLE]


def sent_bytes(format: Format, shape: tuple[int, int], axis: int) -> int:
    """Bytes that a rank sends of its part of that shape, of an operand that is cut along the axis."""
    layout = format.layout
    entries = {name: layout[name].shape(*shape) for name in cut_buffers(format, axis)}
    return sum(rows * cols * layout[name].dtype.itemsize for name, (rows, cols) in entries.items())


def _padded(flat: Tensor) -> Tensor:
    missing = -len(flat) % ALIGNED
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _whole(parts: Tensor, axis: int, runs: int) -> Tensor:
    """uint8 [W, rows, bytes of a row], of which every rank has `runs` pieces along the axis -> the whole."""
    if axis == 0:
        return words.in_order(parts.unflatten(1, (runs, -1)).transpose(0, 1)).flatten(0, 2)
    return words.in_order(parts.unflatten(2, (runs, -1)).permute(1, 2, 0, 3)).flatten(1)
