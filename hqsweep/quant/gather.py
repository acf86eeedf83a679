"""Gather the codes and scales of an operand whose parts lie over the ranks of a group, in one collective of bytes."""

from collections.abc import Callable
from dataclasses import replace

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
    sent = {name: operand.buffers[name] for name in cut_buffers(operand.format, axis)}
    pieces = [_padded(buffer.contiguous().view(torch.uint8).flatten()) for buffer in sent.values()]
    arriving = begin_gather_bytes(torch.cat(pieces) if len(pieces) > 1 else pieces[0], part.group)
    shape = list(operand.shape)
    shape[axis] *= part.group.size()

    def result() -> Operand:
        arrived, buffers, start = arriving(), dict(operand.buffers), 0
        for (name, buffer), piece in zip(sent.items(), pieces, strict=True):
            rows, cols = buffer.shape
            own = arrived[:, start : start + buffer.nbytes].view(-1, rows, cols * buffer.element_size())
            buffers[name] = _whole(own, axis, part.runs).view(buffer.dtype)
            start += len(piece)
        return replace(operand, buffers=buffers, shape=tuple(shape))

    return result


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
