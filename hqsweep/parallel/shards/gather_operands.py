"""Operands that are gathered: codes and scales of a matrix whose parts lie over ranks, in one collective of bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hqsweep.formats import WHOLE, ExactOperand, Format
from hqsweep.memo import cached_property
from hqsweep.ops.quantize.dequantize import ExactParts
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.wire import memory, p2p_copy
from hqsweep.parallel.wire.collectives import begin_gather_bytes
from hqsweep.quant.operand import Operand

ALIGNED = 16
"""Each buffer of a message begins at a multiple of this number of bytes."""


class Gathering:
    """The operand of a whole matrix, gathered from the operands of every rank's part. A collective, which runs beside
    the work that follows; results wait for it.

    Parts are cut along an axis of the operand, and cut no block. Entries that cover this axis are equal on all ranks,
    and are not sent.

    lent: exact() may return memory where messages arrive, good until ranks of the group begin to exchange other rows.
    early: as p2p_copy.begin takes it. sending: this rank's part, of one buffer, was sent in it before.
    """

    def __init__(
        self,
        operand: Operand,
        axis: int,
        part: Part,
        *,
        lent: bool = False,
        early: bool = False,
        sending: p2p_copy.Sending | None = None,
    ) -> None:
        self.operand, self.axis, self.part = operand, axis, part
        sent = {name: _Sent.of(operand.buffers[name], axis) for name in cut_buffers(operand.format, axis)}
        pieces = [_padded(own.buffer.view(torch.uint8).flatten()) for own in sent.values()]
        self._joins = lent and operand.format.high_precision and part.runs == 1 and _follow(sent)
        if sending is None:
            self._arriving = _begin_messages(pieces, part.group, own=self._joins, early=early)
        else:
            self._arriving = sending.received
        self._parts = ExactParts(part.group.size(), operand.format, operand.shape)
        if lent and self._decodes_parts:
            p2p_copy.owe(part.group, pieces[0].device, self._decode_own)
        starts = accumulate((len(piece) for piece in pieces), initial=0)
        self.sent = [(name, own, start) for (name, own), start in zip(sent.items(), starts, strict=False)]

    @cached_property
    def messages(self) -> Tensor:
        """The messages of all ranks, uint8 [W, bytes], or [W - 1, bytes] without this rank's."""
        return self._arriving()

    @cached_property
    def arrived(self) -> Mapping[int, Tensor]:
        """The message of each rank, uint8 [bytes]; this rank's may be missing."""
        ranks = list(range(self.part.group.size()))
        if len(self.messages) < len(ranks):
            ranks.remove(self.part.group.rank())
        return dict(zip(ranks, self.messages, strict=True))

    def whole(self) -> Operand:
        """The operand of the whole."""
        ranks, whole = range(self.part.group.size()), {}
        for name, own, start in self.sent:
            whole[name] = own.whole([self._bytes(rank, own, start) for rank in ranks], self.part.runs)
        return self._of(whole)

    def _of(self, buffers: Mapping[str, Tensor]) -> Operand:
        """The operand of the whole with these buffers."""
        shape = list(self.operand.shape)
        shape[self.axis] *= self.part.group.size()
        return replace(self.operand, buffers={**self.operand.buffers, **buffers}, shape=tuple(shape))

    def exact(self) -> ExactOperand:
        """whole().operand(), with fewer copies.

        Where ranks have columns that follow each other, each part is decoded in place. Values that may be lent are not
        copied.
        """
        if self._joins:
            return self._of({name: own.joined(self.messages) for name, own, _ in self.sent}).operand()
        if not self._decodes_parts:
            return self.whole().operand()
        self._decode_own()
        for rank in self.arrived:
            self._parts.decode(rank, self.of_rank(rank).buffers)
        return self._parts.operand()

    @property
    def _decodes_parts(self) -> bool:
        return self.axis == 1 and self.part.runs == 1 and not self.operand.format.high_precision

    def _decode_own(self) -> None:
        self._parts.decode(self.part.group.rank(), self.operand.buffers)

    def _bytes(self, rank: int, own: "_Sent", start: int) -> Tensor:
        """The bytes of one buffer in a rank's message. start: where the buffer begins."""
        arrived = self.arrived.get(rank)
        return own.buffer.view(torch.uint8).flatten() if arrived is None else arrived[start : start + own.buffer.nbytes]

    def of_rank(self, rank: int) -> Operand:
        """The operand of one rank's part, as it arrived, without a copy.

        It is good until ranks of the group begin to exchange other rows.
        """
        if rank == self.part.group.rank():
            return self.operand
        parts = {name: own.part(self._bytes(rank, own, start)) for name, own, start in self.sent}
        return replace(self.operand, buffers={**self.operand.buffers, **parts})


def _begin_messages(pieces: Sequence[Tensor], group: ProcessGroup, *, own: bool, early: bool) -> Callable[[], Tensor]:
    """Start to send this rank's message, uint8 [bytes] in pieces, to all others. The result gives all messages, uint8
    [W, bytes].

    With own=False, and where copy engines carry the messages, it gives [W - 1, bytes] without this rank's.
    """
    others = [other for other in range(group.size()) if other != group.rank()]
    arriving = p2p_copy.begin(dict.fromkeys(others, pieces), group, own=pieces if own else (), early=early)
    return arriving or begin_gather_bytes(torch.cat(pieces) if len(pieces) > 1 else pieces[0], group)


class _Sent(NamedTuple):
    """A buffer as it is sent: in the order of its memory, which for high-precision values is the order of X."""

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

    def whole(self, arrived: Sequence[Tensor], runs: int) -> Tensor:
        """The operand's buffer, from the bytes of every rank's part."""
        rows, cols = self.buffer.shape
        parts = [part.view(rows, cols * self.buffer.element_size()) for part in arrived]
        whole = _whole(parts, self.axis, runs).view(self.buffer.dtype)
        return whole.t() if self.turned else whole

    def joined(self, messages: Tensor) -> Tensor:
        """The operand's buffer, as a view of the messages of all ranks, which follow each other."""
        whole = messages.view(self.buffer.dtype).view(-1, self.buffer.shape[1])
        return whole.t() if self.turned else whole

    def part(self, arrived: Tensor) -> Tensor:
        """The operand's buffer of one rank's part, from its bytes."""
        part = arrived.view(self.buffer.dtype).view(self.buffer.shape)
        return part.t() if self.turned else part


def _follow(sent: Mapping[str, _Sent]) -> bool:
    """Whether the messages of all ranks, one after the other, are the buffer of the whole."""
    return all(own.axis == 0 and own.buffer.nbytes % ALIGNED == 0 for own in sent.values()) and len(sent) == 1


def cut_buffers(format: Format, axis: int) -> list[str]:
    """The names of the buffers in which each rank has its own entries."""
    return [name for name, buffer in format.layout.items() if (buffer.rows, buffer.cols)[axis] != WHOLE]


def sent_bytes(format: Format, shape: tuple[int, int], axis: int) -> int:
    """The bytes that a rank sends of its part, for an operand that is cut along this axis. shape: the part's."""
    layout = format.layout
    entries = {name: layout[name].shape(*shape) for name in cut_buffers(format, axis)}
    return sum(rows * cols * layout[name].dtype.itemsize for name, (rows, cols) in entries.items())


def _padded(flat: Tensor) -> Tensor:
    missing = -len(flat) % ALIGNED
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _whole(parts: Sequence[Tensor], axis: int, runs: int) -> Tensor:
    """The whole [rows, bytes of a row], from uint8 parts of every rank. runs: the pieces of each part along the
    axis."""
    pieces = [part.unflatten(axis, (runs, -1)) for part in parts]
    first = pieces[0]
    whole = first.new_empty((*first.shape[: axis + 1], len(pieces), *first.shape[axis + 1 :]))
    for piece, place in zip(pieces, whole.unbind(axis + 1), strict=True):
        memory.copy_(place, piece)
    return whole.flatten(axis, axis + 2)
