"""Tests marked `gpu`, and those of ranks that exchange by NCCL, `gpu2`, are deselected where there is no CUDA device.
HQSWEEP_EXTENSION=FILE tests another build of the kernels. `--durations-file=FILE` records how long each file takes;
of two processes, each begins with the files that took longest in durations.jsonl, so that both end at one time.
"""

import gc
import json
import os
import time
from collections import defaultdict
from datetime import date
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from support.fuzz import extension_file
from support.sweep.forked_workers import ForkedWorker

from hqsweep.jobs.isolation import make_deterministic
from hqsweep.sweep.engine import process

if "HQSWEEP_EXTENSION" in os.environ:
    extension_file.use(os.environ["HQSWEEP_EXTENSION"])

for name in ("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)  # width and colours of output are those that a test asks for


def pytest_addoption(parser):
    parser.addoption("--durations-file", type=Path, help="write a line of JSON for the run, and one for each test file")


def pytest_configure(config):
    path = config.getoption("--durations-file")
    is_worker = hasattr(config, "workerinput")  # of xdist; its reports reach the process that started it
    if path is not None and not is_worker:
        config.pluginmanager.register(Durations(path, config.getoption("markexpr")))


class Durations:
    """Writes the seconds of each test file, with its fixtures, in the order of seconds; before them the whole run.
    cpu_seconds, which depend less on what else the machine does, count processes that a test waited for, and ranks."""

    def __init__(self, path: Path, selected: str) -> None:
        self.path, self.selected, self.start = path, selected, time.monotonic()
        self.seconds, self.cpu, self.cases = defaultdict(float), defaultdict(float), defaultdict(int)

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        self.cases[file] += report.when == "setup"
        if report.when == "teardown":
            self.cpu[file] += dict(report.user_properties)["cpu_seconds"]

    def pytest_sessionfinish(self):
        run = {"selected": self.selected, "date": date.today().isoformat(), "cpus": os.cpu_count()}
        run |= {"seconds": round(time.monotonic() - self.start, 1), "cases": sum(self.cases.values())}
        files = sorted(self.seconds, key=self.seconds.get, reverse=True)
        run["cpu_seconds"] = round(sum(self.cpu.values()))
        rows = [
            {"file": file, "cases": self.cases[file]}
            | {"seconds": round(self.seconds[file], 1), "cpu_seconds": round(self.cpu[file], 1)}
            for file in files
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(row) + "\n" for row in [run, *rows]))


def cpu_seconds() -> float:
    """CPU seconds of this process, of children that have ended, and of ended ranks, which are children of a server."""
    own, server = sum(os.times()[:4]), getattr(forkserver._forkserver, "_forkserver_pid", None)
    stat = Path(f"/proc/{server}/stat")
    if server is None or not stat.is_file():
        return own
    return own + sum(map(int, stat.read_text().rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.user_properties.append(("cpu_seconds", -cpu_seconds()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    yield
    item.user_properties[0] = ("cpu_seconds", item.user_properties[0][1] + cpu_seconds())


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and cases live as long as the process. To search them for garbage takes seconds in all."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        rows = map(json.loads, (Path(__file__).parent / "durations.jsonl").read_text().splitlines()[1:])
        seconds = {row["file"]: row["seconds"] for row in rows}
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpu2")]
    config.hook.pytest_deselected(items=needs_gpu)  # a third of all cases: to skip each would take a minute
    gone = set(needs_gpu)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture
def deterministic():
    """On CUDA: as training runs, so that bytes of two runs can be compared."""
    if not torch.cuda.is_available():
        yield
        return
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def forked_workers(monkeypatch):
    """Local sweeps start their workers a hundred times as fast."""
    monkeypatch.setattr(process, "WorkerProcess", ForkedWorker)
