"""Runs of several ranks by the local engine: a rank that dies is named, the next attempt goes on, nothing is left."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.sweep.shown import Shown
from support.sweep.slurm_cluster import free_port

from hqsweep.config.job import parse
from hqsweep.errors import Damaged
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.parallel.wire.spawn import FORKED, start_server
from hqsweep.sweep.engine import ranks
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.ranks import Meeting, nodes_arguments
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.sweep.store.verify import verify

pytestmark = pytest.mark.slow

CONFIG = {
    "job": "convergence", "sweep": "t",
    "recipe": {"name": "mxfp8", "linear": "mxfp8"},
    "model": {"dim": 32, "layers": 1, "heads": 2},
    "data": {"source": "markov", "markov": {"length": 20_000}},
    "train": {"steps": 40, "batch": 4, "context": 32, "log_every": 1, "eval_every": 20, "eval_batches": 2,
              "checkpoint_every": 10, "device": "cpu", "parallel": {"dp_shard": 2}},
    "stats": {"every": 20},
}  # fmt: skip


def make_run(root: Path, **train) -> RunDir:
    config = parse(CONFIG | {"runs_dir": str(root), "train": CONFIG["train"] | train}).model_dump(mode="json")
    point = SimpleNamespace(config=config, arm="mxfp8", overrides=[])
    return RunStore(root).create(sweep="t", conf="t", overrides=[], runs=[point])[0]


def ranks_of(run: RunDir) -> dict[int, int]:
    """Rank -> process of the ranks of a run that are alive."""
    pids = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rank = (process / "comm").read_text().strip().partition(":")
            if name == "hqsweep" and (process / "fd" / "1").readlink() == run.log.absolute():
                pids[int(rank)] = int(process.name)
        except (OSError, ValueError):
            continue
    return pids


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def without_norm(rows):
    return [row for row in rows if row["metric"] not in ("grad_norm",)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu2)])
def broken_off(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Shown]:
    """A run one of whose ranks was killed after a checkpoint, and whose worker was killed in the next attempt, with two
    checkpoints and rows after them; on GPUs both ranks share one."""
    run, display = make_run(tmp_path_factory.mktemp("broken_off"), device=request.param), Shown()

    def saved(count: int) -> bool:
        return len(list(run.checkpoint.glob("step_*.json"))) >= count

    def kill() -> None:
        wait_for(lambda: saved(1))
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        wait_for(lambda: run.seen()["attempt"] == 2 and saved(2))
        os.kill(run.seen()["pid"], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    run_local([run], display=display, limits=Limits(retries=1, backoff_s=0.1, threads=2, gpus_per_run=1))
    return run, display


def test_a_killed_rank_is_named_and_the_retry_goes_on(broken_off):
    run, display = broken_off
    assert any("rank 1: killed by SIGKILL; trying again in 0.1 s" in line for line in display.lines)
    status = run.status()
    assert (status["state"], status["reason"], status["attempt"]) == ("failed", "killed by SIGKILL", 2)


def test_no_rank_outlives_a_worker_that_is_killed(broken_off):
    wait_for(lambda: not ranks_of(broken_off[0]), seconds=5.0)


def test_no_rank_outlives_a_worker_that_is_stopped(tmp_path):
    """While they run, they have the scheduling policy of ranks on CPUs."""
    run, policies = make_run(tmp_path, steps=100_000), []

    def stop():
        wait_for(lambda: (run.seen()["progress"] or {}).get("step"))
        policies.extend(os.sched_getscheduler(rank) for rank in ranks_of(run).values())
        os.kill(run.seen()["pid"], signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    (status,) = run_local([run], display=Shown(), limits=Limits(threads=2))
    assert (status["state"], status["reason"]) == ("interrupted", "stopped by SIGTERM")
    assert policies == [os.SCHED_BATCH] * 2
    wait_for(lambda: not ranks_of(run), seconds=5.0)


def leave_a_thread(arguments) -> int:
    threading.Thread(target=time.sleep, args=(60,)).start()
    return 0


def rank_that_leaves_a_thread(path: Path) -> None:
    os.environ["RANK"], ranks.WORKER = "0", f"{__name__}:leave_a_thread"
    ranks._be_rank(ranks._Rank(path, (), 1))


def test_a_rank_ends_whatever_threads_its_run_has_left(tmp_path):
    start_server()
    rank = multiprocessing.get_context(FORKED).Process(
        target=rank_that_leaves_a_thread, args=(make_run(tmp_path).path,)
    )
    rank.start()
    rank.join(30)
    assert rank.exitcode == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def mended(
    broken_off: tuple[RunDir, Shown], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[RunDir], dict[RunDir, int]]:
    """A copy of that run, which has ended though its last checkpoint was damaged, and one that its ranks refuse, by the
    same worker; and the process whose forks the ranks of each were."""
    broken, folder, servers = broken_off[0], tmp_path_factory.mktemp("mended"), {}
    shutil.copytree(broken.sweep_path, folder / "t")
    run, device = RunDir(folder / "t" / broken.name), broken.config()["train"]["device"]
    flip(max(run.checkpoint.glob("step_*.json")).with_suffix("") / "__1_0.distcp")
    runs = [run, make_run(folder / "next", context=30_000, device=device)]

    def look() -> None:
        while runs[1].seen()["state"] != "failed":
            with suppress(OSError):  # a rank that has ended since
                for each in runs:
                    for process in ranks_of(each).values():
                        servers.setdefault(each, parent_of(process))
            time.sleep(0.02)  # a rank that refuses lives for a moment only

    threading.Thread(target=look, daemon=True).start()
    run_local(runs, display=Shown(), limits=Limits(threads=2, workers=1, gpus_per_run=1))
    return runs, servers


def test_a_worker_has_ranks_for_the_next_run_and_what_one_refuses_is_said_in_its_words(mended):
    """Ranks of all runs of a worker are forks of one server; each writes to the log of its run."""
    runs, servers = mended
    first, status = (run.status() for run in runs)
    assert (first["state"], first["pid"]) == ("finished", status["pid"])
    assert servers[runs[0]] == servers[runs[1]]
    refusal = "data: the train split has 20000 tokens"
    assert status["state"] == "failed" and status["reason"].startswith(refusal)
    assert [refusal in run.log.read_text() for run in runs] == [False, True]
    assert not ranks_of(runs[1])


def test_damage_to_what_many_ranks_wrote_is_named_and_made_good(mended, tmp_path):
    """Then the run ends with the rows of one process that was never killed."""
    run = mended[0][0]
    device = run.config()["train"]["device"]
    assert not ranks_of(run)
    sink, train = ListSink(), CONFIG["train"] | {"parallel": {}, "microbatches": 2, "device": device}
    convergence.run(parse(CONFIG | {"runs_dir": str(tmp_path), "train": train}), sink, tmp_path)
    assert run.status()["state"] == "finished"
    assert without_norm(run.rows("metrics")) == without_norm(sink.metrics)
    assert run.rows("stats") == sink.tables["stats"]
    shared = [line for line in run.manifest().get("warnings", []) if line.startswith("2 ranks share a GPU")]
    assert len(shared) == (device == "cuda")
    (repair,) = run.manifest()["repairs"]
    said = r"checkpoint/step_\d+: its bytes are not those that were written; the run went on from step_"
    assert re.search(said, repair), repair
    assert not verify([run.sweep_path], done=lambda *_: None).faults
    last = max(run.checkpoint.glob("step_*"), key=lambda path: path.is_dir())
    flip(next(last.glob("__0_*")))
    (fault,) = verify([run.sweep_path], done=lambda *_: None).faults
    assert "its bytes are not those that were written" in str(fault)
    flip(run.jsonl("stats"))
    with pytest.raises(Damaged, match=r"stats.jsonl: is not what it was when the run ended"):
        run.rows("stats")


def test_two_machines_share_a_run_and_name_the_rank_that_died_on_the_other(tmp_path):
    run, display, endpoint = make_run(tmp_path), Shown(), f"localhost:{free_port()}"
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
