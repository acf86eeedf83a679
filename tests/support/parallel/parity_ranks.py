"""What ranks of tests/jobs/test_parity_ranks.py run: the check of ranks, then columns in which a rank goes wrong."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hqsweep.jobs.parity import ranks
from hqsweep.jobs.parity.rank_cases import Column, Problem, Results
from hqsweep.parallel.shards import shard_part
from hqsweep.parallel.shards.gather_operands import Gathering
from hqsweep.parallel.shards.shard import Place
from hqsweep.parallel.shared import token_route
from hqsweep.parallel.shared.token_route import Messages
from hqsweep.quant.operand import Operand
from hqsweep.recipe.sections import LinearQuantizers


def flip(codes: Tensor) -> None:
    codes.view(torch.uint8).view(-1)[0] ^= 1


def flipped_as_it_arrives() -> AbstractContextManager:
    """A bit of the operand that is put together from all ranks' tokens."""

    def whole(self: Gathering) -> Operand:
        operand = gathered(self)
        flip(operand.buffers["q"])
        return operand

    gathered = Gathering.whole
    return mock.patch.object(Gathering, "whole", whole)


def flipped_message() -> AbstractContextManager:
    """A bit of the first token that came as codes."""

    def operand(self: Messages, rows: Tensor, *place: object) -> Operand:
        flip(rows)
        return received(self, rows, *place)

    received = Messages.operand
    return mock.patch.object(token_route.Messages, "operand", operand)


def drawn_elsewhere() -> AbstractContextManager:
    """Random bits of a part of columns, which are those of its places in the whole, drawn for places of its own."""

    def of_part(x: Tensor, own: shard_part.Part) -> list[tuple[Tensor, Place]]:
        return [(x, Place(0, 0, *x.shape))] if own.axis == 1 else placed(x, own)

    placed = shard_part._placed
    return mock.patch.object(shard_part, "_placed", of_part)


def own_amaxes() -> AbstractContextManager:
    """On all ranks, which would wait for each other: amaxes of the part in place of those of the whole."""
    return mock.patch.object(shard_part, "largest", lambda *_: None)


class Damage(NamedTuple):
    """A way to go wrong on rank 1, or on all, and how the row of operands names it."""

    subject: str
    column: tuple[str, str]
    context: object
    named: str
    everywhere: bool = False

    @property
    def of_column(self) -> Column:
        [column] = [each for each in ranks.COLUMNS if (each.name, each.case) == self.column]
        return column


DAMAGES = {
    "a code that came": Damage(
        "mxfp8|fp8_current", ("tp", "by column, tokens split"), flipped_as_it_arrives, "parity: input rowwise q"
    ),
    "a token's code": Damage(
        "fp8_block|nvfp4@rowwise_dequantized", ("ep", ""), flipped_message, "parity.fc1.4: input rowwise q"
    ),
    "a place": Damage("nvfp4+rht+sr", ("tp", "by column"), drawn_elsewhere, "parity: grad_output rowwise q"),
    "an amax": Damage("nvfp4|nvfp4", ("tp", "by row"), own_amaxes, "parity: input rowwise", everywhere=True),
}


def checked(
    rank: int, count: int, sections: dict[str, LinearQuantizers], damaged: dict[str, LinearQuantizers]
) -> Iterator[ranks.RankResults | dict[str, Results]]:
    """What ranks yield for each subject; at last, damage -> the results of its column."""
    device = torch.device("cpu")
    yield from ranks._results(rank, count, list(sections.values()), 0, device)
    results = {}
    for name, quantizers in damaged.items():
        damage = DAMAGES[name]
        with damage.context() if rank == 1 or damage.everywhere else nullcontext():
            results[name] = damage.of_column.ranked(Problem(quantizers, 0, count, device), rank)
    yield results
