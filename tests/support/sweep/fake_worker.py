"""A worker without torch: locks, speaks and dies as the real one may. `do` in the run's config says how.

`fake_worker.py --parent PID` is the worker, `fake_worker.py --sweep WORKERS SWEEP_PATH` a parent that runs the sweep
with such workers.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from hqsweep.errors import EXIT_BUSY
from hqsweep.host import Busy
from hqsweep.sweep.console import PlainDisplay
from hqsweep.sweep.engine import process, slurm
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.process import serve, stop_with_parent
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train.record import Record, write_record


def command() -> list[str]:
    return [sys.executable, __file__, "--parent", str(os.getpid())]


def work_in_slurm(paths: list[Path], limit_s: float | None, options: dict) -> None:
    """slurm.work with such workers."""
    process.worker_command = command
    slurm.work(paths, limit_s, options)


def terminated(number: int, frame: object) -> None:
    """Again and again until it is caught: Python drops what is raised in the midst of a destructor."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, terminated)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    raise SystemExit(143)


def act(run: RunDir, do: str) -> None:
    """What the run does between `running` and `finished`."""
    if do == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "gone":  # as the worker ends that finds its folder deleted
        shutil.rmtree(run.path)
        os._exit(EXIT_BUSY)
    if do == "exit":
        print("boring line\nModuleNotFoundError: no module named spam\n", flush=True)
        os._exit(1)
    if do == "say":
        print(f"{run.name} by Python", flush=True)
        subprocess.run(["echo", f"{run.name} by a child"], check=True)
    if run.trunk() is not None:
        assert run.trunk_state().read_text() == f"state {run.fork().start}"
    if do.startswith("trunk"):
        train_trunk(run, do)
    if do == "raise" or (do == "flaky" and run.written_status()["attempt"] < 3):
        run.write_status(state="failed", reason="RuntimeError: out of luck", exit_code=3)
        os._exit(3)
    if do == "orphan":  # the process above it dies first, and nobody is left to speak
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "again" and run.written_status()["attempt"] == 1:
        time.sleep(60)
    if do == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if do == "waits":
        (run.path / "waits").touch()  # all that is read of the run has been read
    while do == "waits" and not (run.path.parent / "go").exists():
        time.sleep(0.02)
    time.sleep({"sleep": 60, "stubborn": 60, "short": 0.3}.get(do, 0.02))


def train_trunk(run: RunDir, do: str) -> None:
    """Keep the state at each point; trunk-fails and trunk-dies do so after the first, at the first attempt alone."""
    for step in run.fork().at:
        time.sleep(60 if do == "trunk-sleeps" and step > 1 else 0.3)
        if step > 1 and run.written_status()["attempt"] == 1 and do == "trunk-dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if step > 1 and not (run.path / "mended").exists() and do == "trunk-fails":
            run.write_status(state="failed", reason="RuntimeError: out of luck", exit_code=3)
            os._exit(3)
        keep_state(run, step)


def keep_state(run: RunDir, step: int, state: str | None = None) -> None:
    """A checkpoint of a trunk at a point, with its record."""
    data, path = (state or f"state {step}").encode(), run.checkpoint / f"step_{step}.pt"
    run.checkpoint.mkdir(exist_ok=True)
    path.write_bytes(data)
    mark = {"file": path.name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    write_record(path, Record(**mark, run=run.manifest()["run_id"], point=True))


def work(run: RunDir) -> int:
    if run.written_status()["state"] == "finished":
        return 0
    with (run.path / "starts").open("a") as starts:
        starts.write(f"{os.environ['OMP_NUM_THREADS']} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    signal.signal(signal.SIGTERM, terminated)
    attempt = run.written_status()["attempt"] + 1
    try:
        run.write_status(state="running", reason=None, pid=os.getpid(), host=os.uname().nodename, attempt=attempt)
        act(run, run.config()["do"])
    except SystemExit:
        signal.setitimer(signal.ITIMER_REAL, 0)
        run.write_status(state="interrupted", reason="stopped by SIGTERM", exit_code=143)
        return 143
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run.path / "product").write_text("done")
    run.write_status(state="finished", exit_code=0)
    return 0


def locked_work(run: RunDir) -> int | None:
    try:
        with run.lock(wait_s=1):
            return work(run) or None
    except Busy:
        return EXIT_BUSY
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(role: str, number: int, *sweep: str) -> int:
    if role == "--sweep":
        process.worker_command = command
        path = Path(sweep[0])
        runs = RunStore(path.parent).runs(path.name)
        run_local(runs, display=PlainDisplay(Console()), limits=Limits(workers=number))
        return 0
    stop_with_parent(number)
    return serve(locked_work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
