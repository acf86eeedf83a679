"""kill -9 at random moments with real trainings; kill_sweep.py deals as many as one likes."""

import random
import signal

import pytest
import torch
from support.sweep import kill_sweep

from hqsweep import worker


@pytest.fixture
def left_in_peace(tmp_path, make):
    """The rows of the same sweep without kills, trained here, with the threads and the signal handlers put back."""
    before = {number: signal.getsignal(number) for number in (*worker.STOP_SIGNALS, signal.SIGALRM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = make(tmp_path / "whole", seeds=[0])
    assert [worker.main([str(run.path)]) for run in whole] == [0] * len(whole)
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)
    return kill_sweep.rows(whole)


@pytest.mark.slow
@pytest.mark.parametrize("make", [kill_sweep.make_sweep, kill_sweep.make_study])
def test_a_killed_sweep_ends_with_the_rows_of_one_left_in_peace(tmp_path, make, left_in_peace):
    runs = make(tmp_path / "cut", seeds=[0])
    dealt = kill_sweep.finish_under_kills(runs, random.Random(3), kills=2)
    assert dealt.total() >= 1
    assert kill_sweep.rows(runs) == left_in_peace
