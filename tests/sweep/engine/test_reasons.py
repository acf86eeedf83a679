"""Why a run failed, in one line: memory that ran out, kills for memory, and other errors."""

import numpy as np
import pytest
import torch

from hqsweep.errors import UserError
from hqsweep.host import Memory
from hqsweep.jobs.sink import Diverged
from hqsweep.sweep.engine.task import GIB, killed_for_memory, reason_of

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 139.81 GiB of which 5.06 GiB is"
    " free. Including non-PyTorch memory, this process has 134.74 GiB memory in use."
)


def raised(call):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        call()
    return reason_of(caught.value)


def test_memory_of_a_gpu_says_what_was_asked_and_what_was_free():
    said = reason_of(torch.OutOfMemoryError(CUDA))
    assert said.startswith("out of memory: 20.00 GiB were asked of GPU 1, where 5.06 GiB of 139.81 GiB were free; give")
    assert "engine.runs_per_gpu" in said
    assert reason_of(torch.OutOfMemoryError("no words")).startswith("out of GPU memory: no words; give fewer")


def test_memory_of_the_cpu_says_what_was_asked():
    assert raised(lambda: torch.empty(2**60, dtype=torch.uint8)).startswith(
        "out of memory: 1073741824.0 GiB were asked"
    )
    assert raised(lambda: np.empty(2**60, dtype=np.uint8)).startswith("out of memory: 1.00 EiB were asked for at once")
    assert reason_of(MemoryError()).startswith("out of memory; give fewer engine.workers")


def test_divergence_says_what_to_change():
    said = reason_of(Diverged(37, float("nan"), 0.01))
    assert said.startswith("loss is nan at step 37; a repeat would say the same: lower train.lr (0.01)")


def test_other_errors_are_told_with_their_type_unless_they_are_meant_for_people():
    assert reason_of(KeyError("x")) == "KeyError: 'x'"
    assert reason_of(UserError("data.path:\n none there")) == "data.path: none there"


@pytest.fixture
def machine(tmp_path):
    """machine({path: text}) -> the Memory of such a machine."""

    def make(files):
        base = {"proc/vmstat": "nr_free_pages 5\noom_kill 2\n", "proc/meminfo": f"MemTotal: {64 * 2**20} kB\n"}
        for name, text in {**base, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Memory(root=tmp_path)

    return make


V2 = {
    "proc/self/cgroup": "0::/jobs/one\n",
    "sys/fs/cgroup/jobs/one/memory.max": "max\n",
    "sys/fs/cgroup/jobs/one/memory.events": "low 0\noom 1\noom_kill 1\n",
    "sys/fs/cgroup/jobs/memory.max": f"{24 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.events": "oom_kill 3\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/box\n0::/\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{24 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(("files", "kills"), [(V2, 6), (V1, 6), ({}, 2)])
def test_kills_of_the_machine_and_of_every_group_above_are_counted(machine, files, kills):
    assert machine(files).kills() == kills


@pytest.mark.parametrize(
    ("files", "there"), [(V2, "its control group has 24.0 GiB"), (V1, "its control group has 24.0 GiB"),
                         ({}, "the machine has 64.0 GiB"), ({"proc/meminfo": ""}, "its limit is unknown")]
)  # fmt: skip
def test_a_kill_that_was_counted_is_told_with_what_was_there_and_what_to_do(machine, files, there):
    memory = machine(files)
    assert killed_for_memory(memory, memory.kills(), 30 * GIB) is None
    said = killed_for_memory(memory, memory.kills() - 1, 30 * GIB)
    assert said.startswith(f"killed for memory: {there}, the run's process had 30.0 GiB; give fewer engine.workers")
    unknown = killed_for_memory(memory, memory.kills() - 1, None)
    assert unknown.startswith(f"killed for memory: {there}; give fewer engine.workers")


def test_a_container_sees_its_own_group_as_the_mount(machine):
    files = {"proc/self/cgroup": "0::/../../elsewhere\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
             "sys/fs/cgroup/memory.events": "oom_kill 1\n"}  # fmt: skip
    memory = machine(files)
    assert memory.limit() == ("its control group", 2 * GIB) and memory.kills() == 3


def test_this_machine_has_some_memory():
    assert Memory().limit()[1] > 0
