"""Killed for memory: what the kernel's files say, in cgroup v2, v1, and without either."""

import pytest

from hqsweep.sweep.engine.memory import GIB, Memory, killed_for_memory


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
