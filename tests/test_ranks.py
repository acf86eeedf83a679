"""run_ranks returns what each rank returned, and raises where one fails; stream_ranks yields as the ranks go on."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import run_ranks

from hqsweep.dist.spawn import stream_ranks


def total(rank, offset):
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    if value == 1:
        raise ValueError(f"rank {rank} fails")
    return value


def test_ranks_meet_and_failures_are_raised():
    assert run_ranks(2, total, 5) == [11, 11]
    with pytest.raises(mp.ProcessRaisedException, match=r"rank . fails"):
        run_ranks(2, total, 0)


def counted(rank, path):
    for number in range(100):
        path.with_suffix(f".{rank}.{number}").touch()
        dist.barrier()
        yield 10 * number + rank
        while number and not path.exists():
            time.sleep(0.01)


def test_values_come_while_the_ranks_go_on(tmp_path):
    """Both are at their second value when the caller has the first, and are ended with the caller."""
    values = stream_ranks(2, counted, tmp_path / "go")
    assert next(values) == [0, 1] and next(values) == [10, 11]
    assert mp.active_children() != []
    values.close()
    assert mp.active_children() == []
    assert not list(tmp_path.glob("go.*.3"))
