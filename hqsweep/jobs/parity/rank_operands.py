"""The operands that products of linears read, as the check of ranks compares them: codes and scales by name.

A product is given to a reader of the context before it is formed (nn.context.Context.reader), so that what is compared
is what it reads: codes that were made here, that came from other ranks, or that ranks made with amaxes of the whole.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hqsweep.formats import WHOLE
from hqsweep.nn.core.context import current, within
from hqsweep.quant.operand import Operand
from hqsweep.recipe.pairs import GEMMS

PREFIX = "operand of "
"""The beginning of the names of results that are operands."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """An operand that a product has read."""

    layer: str
    """The name of the linear, for an expert with its number behind it."""
    tensor: str
    direction: str
    microbatch: int
    operand: Operand

    def results(self, step: int, ranks: int = 1, cut: int | None = None) -> list[dict[str, Tensor]]:
        """Name -> buffer, for each of the ranks, of the part that it has of the operand where the matrix is cut along
        this axis, or of all of it."""
        axis = None if cut is None else cut if self.direction == "rowwise" else 1 - cut
        parts = [dict[str, Tensor]() for _ in range(ranks)]
        for name, buffer in self.operand.format.layout.items():
            tensor = self.operand.buffers[name]
            is_cut = axis is not None and (buffer.rows, buffer.cols)[axis] != WHOLE
            pieces = tensor.chunk(ranks, axis) if is_cut else [tensor] * ranks
            text = f"{self.tensor} {self.direction} {name}, microbatch {self.microbatch}, step {step}"
            for part, piece in zip(parts, pieces, strict=True):
                part[f"{PREFIX}{self.layer}: {text}"] = piece
        return parts


@contextmanager
def reading() -> Iterator[list[Read]]:
    """Notes the operands of all products of linears that are called inside, in forward and in backward."""
    reads: list[Read] = []
    with within(replace(current(), reader=_reader(reads))):
        yield reads


def _reader(reads: list[Read]) -> Callable[[Any, str, Any, Any], None]:
    def note(call: Any, gemm: str, *operands: Any) -> None:
        for (tensor, direction), operand in zip(GEMMS[gemm], operands, strict=True):
            members = [operand] if call.splits is None else operand.members
            for single, member in zip(call.singles, members, strict=True):
                # Copies: fully_shard frees what it gathers, and a matrix in high precision is its own operand.
                buffers = {name: buffer.clone() for name, buffer in member.buffers.items()}
                names = {"layer": single.layer, "tensor": tensor, "direction": direction}
                microbatch = call.context.microbatch
                reads.append(Read(**names, microbatch=microbatch, operand=replace(member, buffers=buffers)))

    return note
