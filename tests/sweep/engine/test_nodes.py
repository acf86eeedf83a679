"""Ranks on several machines, which are processes here that meet as the tasks of a Slurm job do."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.sweep.shown import Shown

from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.nodes import Meeting, free_endpoint
from hqsweep.sweep.engine.ranks import nodes_arguments
from tests.sweep.engine.test_ranks import make_run, parent_of, ranks_of, wait_for

pytestmark = pytest.mark.slow


def test_two_machines_share_a_run_and_name_the_rank_that_died_on_the_other(tmp_path):
    run, display, endpoint = make_run(tmp_path), Shown(), free_endpoint("localhost")
    meeting = Meeting(endpoint, serves=True)
    code = f"from hqsweep.sweep.engine.ranks import help_out; help_out(2, '{endpoint}')"
    other = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    killed = []

    def kill():
        wait_for(lambda: list(run.checkpoint.glob("step_*.json")))
        rank, process = next((r, p) for r, p in ranks_of(run).items() if parent_of(parent_of(p)) == other.pid)
        killed.append(rank)
        os.kill(process, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    limits = Limits(retries=1, backoff_s=0.1, threads=1, nodes=nodes_arguments(2, endpoint))
    try:
        (status,) = run_local([run], display=display, limits=limits)
    finally:
        meeting.finish()
        said = other.wait(timeout=30)
    assert any(f"rank {killed[0]}: killed by SIGKILL; trying again" in line for line in display.lines), display.lines
    assert (status["state"], status["attempt"], said) == ("finished", 2, 0)
    assert not ranks_of(run)
