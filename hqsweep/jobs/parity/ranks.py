"""Columns ddp, fsdp2, tp, ep and pp of the parity job: ranks together, against one process, to the byte.

For each number in parity.ranks that many processes start once. They exchange tensors by gloo, or on GPUs by NCCL, and
share GPUs where there are fewer. They go through all formats, all ordered pairs of base formats with both columnwise
sources, and recipes.

Each rank's results are compared with one process (rank_cases.py, rank_layers.py): y and dx, sums over ranks
against the sum of as many parts in the order of ranks, and masters and held weights after each update. Another row
compares the operands of x, weight and dy that products read. Further rows compare sums over ranks with one process's
sums, within bounds for the order of sums (rank_cases.py).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
import torch.multiprocessing as mp

from hqsweep.config.job import ParityConfig
from hqsweep.errors import UserError
from hqsweep.formats import bases, parse
from hqsweep.formats.spec import SOURCES
from hqsweep.jobs.isolation import make_deterministic
from hqsweep.jobs.parity.compare_bytes import Rows, row
from hqsweep.jobs.parity.grouped import RECIPES, everywhere
from hqsweep.jobs.parity.rank_cases import DATA_COLUMNS, PREFIX, Column, Problem, Results, order_of_sums
from hqsweep.jobs.parity.rank_layers import LAYER_COLUMNS, STAGE_COLUMNS, shared_sums
from hqsweep.parallel.mesh import backend
from hqsweep.parallel.wire.spawn import stream_ranks
from hqsweep.recipe.sections import LinearQuantizers

COLUMNS: tuple[Column, ...] = (*DATA_COLUMNS, *LAYER_COLUMNS, *STAGE_COLUMNS)
NAMES = frozenset(column.name for column in COLUMNS)
RankResults = list[Results | str]
"""The results of one rank for one subject: for each column its results, or the sentence that refused it."""


def ranks_check(config: ParityConfig, device: torch.device) -> Rows:
    """The rows of every number of ranks, while the ranks go on."""
    if device.type == "cuda":
        make_deterministic()
    sections = subjects(config)
    for ranks in config.parity.ranks:
        subject = next(iter(sections))
        try:
            every = run_ranks(ranks, sections, config.seed, device.type)
            for subject, quantizers in sections.items():
                yield from _rows(subject, Problem(quantizers, config.seed, ranks, device), next(every))
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            note = f"rank {error.error_index} ended with {str(error).strip().splitlines()[-1]}"
            yield row("ranks", subject, f"{ranks} ranks", {}) | {"status": "FAIL", "note": note}


def cases(config: ParityConfig) -> int:
    """The number of rows of columns in the check."""
    return len(config.parity.ranks) * len(subjects(config)) * 2 * len(COLUMNS) if config.parity.ranks else 0


def subjects(config: ParityConfig) -> dict[str, LinearQuantizers]:
    """The subjects: each format, every pair of base formats, and recipes that are neither."""
    sections = {text: everywhere(parse(text)) for text in config.parity.formats}
    for a, b, source in product(bases(), bases(), SOURCES):
        pair = f"{a}|{b}@{source}"
        quantizers = {"input": pair, "weight": pair, "grad_output": b}
        sections[f"{a}|{b}" if source == "original" else pair] = LinearQuantizers.parse(quantizers, "parity")
    return sections | {name: LinearQuantizers.parse(section, "parity") for name, section in RECIPES.items()}


def run_ranks(
    ranks: int, sections: Mapping[str, LinearQuantizers], seed: int, device_type: str
) -> Iterator[list[RankResults]]:
    """Yields the results of each rank, on the CPU, subject by subject. UserError where torch lacks NCCL for GPUs."""
    arguments = (ranks, list(sections.values()), seed, torch.device(device_type))
    return stream_ranks(ranks, _results, *arguments, backend=backend(device_type))


def _results(
    rank: int, ranks: int, sections: list[LinearQuantizers], seed: int, device: torch.device
) -> Iterator[RankResults]:
    if device.type == "cuda":
        make_deterministic()
    for quantizers in sections:
        results: RankResults = []
        for column in COLUMNS:
            try:
                tensors = column.ranked(Problem(quantizers, seed, ranks, device, column.held), rank)
                results.append({name: tensor.cpu() for name, tensor in tensors.items()})
            except UserError as error:
                results.append(str(error))
        yield results


def _rows(subject: str, problem: Problem, every: list[RankResults]) -> Rows:
    """The rows of one subject."""
    for index, column in enumerate(COLUMNS):
        case = f"{problem.ranks} ranks, {column.case}" if column.case else f"{problem.ranks} ranks"
        actual = [own[index] for own in every]
        refused = [sentence for sentence in actual if isinstance(sentence, str)]
        if refused:
            yield row(column.name, subject, case, {}) | {"status": "FAIL", "note": refused[0]}
        else:
            with one_thread():
                expected = column.expected(replace(problem, held=column.held))
            yield from compared((column.name, subject, case), expected, actual)
    yield from order_of_sums(subject, problem, shared_sums(problem))


@contextmanager
def one_thread() -> Iterator[None]:
    """The context of one CPU thread, as each rank has. More threads may add the products of a float32 sum in another
    order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compared(names: tuple[str, str, str], expected: list[Results], actual: list[Results]) -> Rows:
    """Rows, under these names (check, subject, case), that compare all ranks: one of results, one of operands.

    A result that only one side has is a failure.
    """
    check, subject, case = names
    for ending, of_operands in (("", False), (", operands", True)):
        pairs, lone = {}, []
        for rank, sides in enumerate(zip(expected, actual, strict=True)):
            a, b = ({n: t for n, t in side.items() if n.startswith(PREFIX) == of_operands} for side in sides)
            pairs |= {f"{name} on rank {rank} ": (a[name], b[name]) for name in a if name in b}
            lone += [f"{name} on rank {rank}" for name in sorted(a.keys() ^ b.keys())]
        result = row(check, subject, case + ending, pairs)
        yield result | {"status": "FAIL", "note": f"one side alone has {lone[0]}"} if lone else result
