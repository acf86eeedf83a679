"""Error statistics of a sampled step over many ranks: rank 0 joins the samples of all probes, in order of ranks.

Parts of a matrix are joined to the whole first. Then tokens of data-parallel ranks follow each other, like tokens of
microbatches, and the layers and experts of other ranks are added. One gather serves all rows of a step.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hqsweep.nn.core.probe import Key, Probe, Sample, is_of_step, rows_of, what_if_rows_of
from hqsweep.parallel.mesh import Ranks

Samples = Mapping[Key, Sample]


def rows_of_all(probe: Probe, ranks: Ranks) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The rows of the tables stats and what_if, of the probes of all ranks, on rank 0; [] on others. A collective, also
    for ranks without a sample."""
    every = ranks.gather_to_first(probe.samples)
    if every is None:
        return [], []
    total = joined(every, ranks.dims.tp)
    here = {key: sample.to(ranks.device) for key, sample in total.items()}
    return rows_of(probe.step, here), what_if_rows_of(probe.step, here)


def captured_of_all(probe: Probe, ranks: Ranks) -> dict[str, Tensor]:
    """The whole operands that the probes of all ranks have captured, on rank 0; {} on others. A collective."""
    every, whole = ranks.gather_to_first(probe.operands) or [], {}
    for first in range(0, len(every), ranks.dims.tp):
        sharing = every[first : first + ranks.dims.tp]
        for name, (matrix, part) in sharing[0].items():
            if name not in whole:
                whole[name] = matrix if part is None else _put_together([own[name].matrix for own in sharing], *part)
    return whole


def _put_together(parts: Sequence[Tensor], axis: int, runs: int) -> Tensor:
    """The matrix that the ranks' parts form. runs: the number of pieces of each part, which alternate with other
    ranks'."""
    pieces = zip(*(part.chunk(runs, axis) for part in parts), strict=True)
    return torch.cat([piece for run in pieces for piece in run], axis)


def joined(samples: Sequence[Samples], tp: int) -> Samples:
    """One sample for each row, from the samples of all ranks. tp: how many neighbours share matrices and have the same
    tokens.

    Samples of weights are equal on all ranks that have one, and count once.
    """
    total: dict[Key, Sample] = {}
    for first in range(0, len(samples), tp):
        for key, sample in _joined_parts(samples[first : first + tp]):
            if key not in total:
                total[key] = sample
            elif not is_of_step(key.name):
                total[key] = total[key].joined(sample, key.direction)
    return total


def _joined_parts(samples: Sequence[Samples]) -> Iterable[tuple[Key, Sample]]:
    """The samples of ranks that share matrices. Parts are joined; samples that each rank has whole count once."""
    for key in dict.fromkeys(key for own in samples for key in own):
        whole, *others = (own[key] for own in samples if key in own)
        for part in others:
            if whole.cut is not None:
                whole = whole.joined(part, key.direction, whole.cut)
        yield key, whole
