"""The process of runs: `python -m hqsweep.worker RUN_DIR` for one, and without it those that its parent hands over on
stdin, one after another (sweep/engine/process.py). Every engine starts this and nothing else.

For each run it locks the folder, makes a typed config of config.yaml, gives the job a sink, and leaves the outcome in
status.json and the exit code, which ends the process where another run may not follow:

    0 finished    3 failed (the reason is in the status, the traceback in log.txt)    75 another worker has the folder
    74 the folder cannot be written in (disk full, read-only), so the status is an old one
    128 + n  interrupted by signal n; like a killed run it goes on from its last checkpoint when it is started again
"""

import argparse
import contextlib
import faulthandler
import os
import pkgutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hqsweep.config.job import parse
from hqsweep.config.jobs import JOBS, MIRRORED_TABLES
from hqsweep.errors import EXIT_BUSY, EXIT_FAILED, EXIT_STORAGE, Damaged
from hqsweep.host import Busy
from hqsweep.jobs.isolation import isolated
from hqsweep.jobs.sink import QuietSink
from hqsweep.recipe.factories import FindFactory, Importer
from hqsweep.sweep.engine.process import serve, stop_with_parent
from hqsweep.sweep.engine.ranks import Machines, Nodes, Signaled, launch_run, tell
from hqsweep.sweep.engine.task import reason_of
from hqsweep.sweep.store.names import ranks_of, run_id
from hqsweep.sweep.store.run_dir import CANCELLED, RunDir
from hqsweep.track.machine import facts, sampled
from hqsweep.track.open import open_tracker
from hqsweep.track.rows import RowSink
from hqsweep.track.tracker import NullTracker, Tracker

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RAISE_AGAIN_S = 0.5
NOT_IMPORTED = "which the command that started the run did not import; run the sweep's command again"
LOCK_WAIT_S = 2.0
"""The seconds to wait for the lock: longer than a process holds it that only asks for it."""


Do = Callable[[RunDir, Tracker], None]
"""The function that does a run."""


class Stopped(BaseException):
    """SIGTERM or SIGINT came. It is a BaseException, so that no job handles it as an error."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_code = 128 + number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the run, or the parent's runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hqsweep.worker", description="Do a run, or those of a parent.")
    parser.add_argument("run_dir", type=Path, nargs="?", help="the run's folder; needed without --parent")
    parser.add_argument("--parent", type=int, metavar="PID", help="stop when this is no longer the parent process")
    parser.add_argument("--import", dest="factories", metavar="FACTORY", action="append", default=[],
                        help="a Python factory that a recipe may name; without it its runs fail")  # fmt: skip
    parser.add_argument("--import-from", dest="folders", metavar="FOLDER", action="append", default=[],
                        help="where its module is looked for, after the installed packages")  # fmt: skip
    parser.add_argument("--rank", action="store_true", help="as one of the run's ranks, which its worker has launched")
    parser.add_argument("--nodes", type=int, default=1, help="machines of the ranks of its runs")
    parser.add_argument("--endpoint", default=Nodes.endpoint, metavar="HOST:PORT", help="where these machines meet")
    options = parser.parse_args(arguments)
    if options.run_dir is None and options.parent is None:
        parser.error("run_dir is missing")
    faulthandler.enable()
    if options.parent is not None:
        stop_with_parent(options.parent)
    try:
        find = Importer(print, options.folders, options.factories, refusal=NOT_IMPORTED)
        if options.rank:
            return _rank(RunDir(options.run_dir), find)
        words = [f"--import={path}" for path in options.factories]
        words += [f"--import-from={folder}" for folder in options.folders]
        do = partial(_do, find=find, machines=Machines(options.nodes, options.endpoint, words))
        if options.run_dir is not None:
            return _alone(RunDir(options.run_dir), do)
        return serve(partial(_among_others, do=do))
    except OSError:
        with contextlib.suppress(OSError):  # the log is on the same disk
            traceback.print_exc()
        os._exit(EXIT_STORAGE)  # the exit handlers would try to write what stdout still holds


def _among_others(run: RunDir, do: Do) -> int | None:
    """Return the exit code of the run; None if another run may follow in this process.

    A run that did not finish ends the process. So does a user's own code, unless ranks ran it: it may leave state
    anywhere.
    """
    with isolated(), _own_signals():
        exit_code = _alone(run, do)
    return None if exit_code == 0 and _is_ours(run) else exit_code


def _is_ours(run: RunDir) -> bool:
    """Return whether ranks have run it, or no Python function makes its quantizers, model, loss or data."""
    config: Mapping[str, Any] = {"job": None}
    with contextlib.suppress(Damaged):
        config = run.config()
        if ranks_of(config) > 1:
            return True
    model, data = (config.get(section) or {} for section in ("model", "data"))
    if config["job"] != "convergence" or model.get("kind") == "factory" or model.get("loss"):
        return False
    if data.get("source") == "factory":
        return False
    return not any(recipe.get("qfactory") for recipe in (config["recipe"], *config["recipe"]["schedule"]))


def _alone(run: RunDir, do: Do) -> int:
    """Do the run, unless another worker has it; return the exit code."""
    try:
        with run.lock(wait_s=LOCK_WAIT_S) as holds:
            return _work(run, holds, do)
    except Busy:
        print(f"{run.name}: another worker has this run", flush=True)
        return EXIT_BUSY


def _work(run: RunDir, holds: Callable[[], bool], do: Do) -> int:
    """The whole life of one attempt, with the folder locked; `holds` says whether it still is."""
    before, began = run.seen(), time.monotonic()
    if before["state"] == "finished" or before["reason"] == CANCELLED:  # since this one was started
        return 0
    tracker, outcome = _attempt(run, before["attempt"] + 1, do)
    if not holds():  # it was deleted, and a folder that is there now may be another worker's
        print(f"{run.name}: the folder was deleted while the run went on", flush=True)
        tracker.finish(EXIT_FAILED)
        return EXIT_BUSY
    run.write_status(
        **outcome, phase=None, ended=time.time(), seconds=round(before["seconds"] + time.monotonic() - began, 3)
    )
    for table in MIRRORED_TABLES:
        tracker.table(table, run.rows(table))
    if not tracker.finish(outcome["exit_code"]):
        sys.stdout.flush()
        os._exit(outcome["exit_code"])  # the exit handlers of a stuck tracker would wait for it for ever
    return outcome["exit_code"]


def _attempt(run: RunDir, number: int, do: Do) -> tuple[Tracker, dict[str, Any]]:
    """Do the run, as its attempt of that number. Return its tracker, and the fields of its last status."""
    tracker: Tracker = NullTracker()
    try:
        _listen()  # first, so that a signal to a run whose status is running is written down
        run.write_status(
            state="running", reason=None, exit_code=None, pid=os.getpid(), host=socket.gethostname(),
            attempt=number, started=time.time(), ended=None,
        )  # fmt: skip
        tracker = NullTracker() if ranks_of(run.config()) > 1 else open_tracker(run)
        with sampled(run):
            do(run, tracker)
        outcome: dict[str, Any] = {"state": "finished", "exit_code": 0}
    except Stopped as stop:
        _deafen()
        outcome = {"state": "interrupted", "reason": str(stop), "exit_code": stop.exit_code}
    except Exception as error:
        traceback.print_exc()
        outcome = {"state": "failed", "reason": reason_of(error), "exit_code": EXIT_FAILED}
    _deafen()
    return tracker, outcome


def _do_job(run: RunDir, sink: RowSink | QuietSink, find: FindFactory) -> None:
    """Call the job that the config names, with a sink on the run's folder."""
    document = run.config()
    config = parse(document, find)
    try:
        sink.manifest(**facts(with_diff=bool((document.get("track") or {}).get("diff"))))
        pkgutil.resolve_name(JOBS[config.job].run)(config, sink, run.path)
        sink.write_parquet()
    finally:
        sink.close()


def _do(run: RunDir, tracker: Tracker, *, find: FindFactory, machines: Machines) -> None:
    """Do the run here, or have its ranks do it."""
    if (ranks := ranks_of(run.config())) > 1:
        try:
            launch_run(run, ranks, machines)
        except Signaled as signaled:
            raise Stopped(signaled.number) from None
    else:
        _do_job(run, RowSink(run, tracker), find)


def _rank(run: RunDir, find: FindFactory) -> int:
    """The part of one rank: rank 0 writes the rows. Its worker has the folder and leaves the outcome."""
    rank, exit_code = int(os.environ["RANK"]), 0
    tracker: Tracker = NullTracker()
    try:
        tracker = open_tracker(run) if rank == 0 else tracker
        sink = RowSink(run, tracker) if rank == 0 else QuietSink(run_id(run.config()))
        _do_job(run, sink, find)
    except Exception as error:
        traceback.print_exc()
        tell(error, rank)
        exit_code = EXIT_FAILED
    for table in MIRRORED_TABLES if rank == 0 else ():
        tracker.table(table, run.rows(table))
    tracker.finish(exit_code)
    return exit_code


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handlers of signals afterwards, which end a process that waits for a run."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _listen() -> None:
    """Raise Stopped at SIGTERM and SIGINT, and again until _deafen: Python drops what a handler raises in the midst of
    a destructor or of a callback of the import system."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, lambda *_: stop(number, None))
        signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_S)
        raise Stopped(signal.Signals(number))

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def _deafen() -> None:
    """Ignore the signals: the rest is short, and a run that has ended is not interrupted."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
