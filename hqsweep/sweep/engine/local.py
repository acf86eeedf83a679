"""engine=local: worker processes, a fixed number at a time, each for one run after another as long as these finish.

The parent knows a run only by its folder and its process: it hands the folder to a worker, watches, and reads
status.json. So a run may crash in any way and the sweep goes on. A parent killed at any instant leaves folders from
which the same command resumes. And two parents of the same sweep share the work, because each leaves a folder that a
live worker has locked to the other. A fork waits, without a slot, for the state of its trunk.

States:  pending -> running -> finished | failed (crash, exception, time-out) | interrupted (stopped from outside)
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from hqsweep.errors import EXIT_BUSY, Damaged, Missing
from hqsweep.host import NAMED_S, Busy, holder, usable_cpus
from hqsweep.sweep.console import Display
from hqsweep.sweep.engine.process import DELETED, Attempt, Slot, slots, thread_limits
from hqsweep.sweep.engine.task import Task, Until, end_without
from hqsweep.sweep.store.run_dir import CANCELLED, PENDING, RunDir
from hqsweep.train.record import is_point

POLL_S = 0.05
"""The seconds between two looks at the worker processes."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""The signals that end a sweep early; by SIGUSR2 Slurm says that the time is nearly over."""
FOR_WORKER = "waits for a free worker"
GONE = "its folder was deleted before it was started; the same command makes it again"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a sweep: how many runs at a time, on what, and how long and how often each may try."""

    workers: int | None = None
    """The number of runs at a time; with runs_per_gpu as slots() takes them."""
    runs_per_gpu: int | None = None
    gpus_per_run: int | None = None
    """The GPUs of a run of several ranks; as slots() takes them."""
    threads: int | None = None
    """The CPU threads per worker, which the ranks of a run share; None is usable_cpus() // workers, at least 1."""
    timeout_s: float | None = None
    """The seconds that one attempt may take."""
    retries: int = 0
    """The number of further attempts after a failed one, each from the run's last checkpoint."""
    backoff_s: float = 1.0
    """The seconds before the first further attempt, twice as long before each following one."""
    imports: Sequence[str] = ()
    """The worker's arguments with the Python factories that it may import (Importer.arguments)."""
    nodes: Sequence[str] = ()
    """The worker's arguments with the machines of its run's ranks (ranks.nodes_arguments)."""
    fail_fast: bool = False
    """Whether nothing more is started after the first run that failed, retries included."""
    until: Until | None = None
    """The time until which runs start; None for any time."""


def run_local(
    runs: Sequence[RunDir], *, display: Display, limits: Limits = Limits(), force: bool = False
) -> list[dict[str, Any]]:
    """Bring every run to an end; returns their statuses (contents of status.json) in the order of `runs`. Runs start in
    this order, but for forks whose trunk is not yet at their point: runs after them go first.

    force: delete the output of runs and repeat them; without it finished runs are skipped.

    At one of STOP_SIGNALS the workers are stopped, their runs are interrupted, and SystemExit(128 + signal) is raised;
    a second signal kills them at once. Call it from the main thread.
    """
    free = slots(limits.workers, limits.runs_per_gpu, limits.gpus_per_run)
    each = limits.threads or max(1, usable_cpus() // len(free))
    asked = os.environ.get("OMP_NUM_THREADS")
    if limits.threads is None and asked not in (None, str(each)):
        display.say(
            f"each run takes {each} CPU threads: OMP_NUM_THREADS={asked} is not read, as numbers depend on it;"
            " engine.threads=N sets it"
        )
    threads = thread_limits(each)
    words = [*limits.imports, *limits.nodes]
    pool = _Pool(display=display, limits=limits, slots=[Slot({**threads, **gpu}, words) for gpu in free])
    with display, _caught_signals() as caught:
        try:
            pool.enqueue(runs, force=force)
            pool.announce()
            while pool.busy() and not caught:
                pool.turn()
                pool.wait()
            if pool.late:
                display.say(limits.until.line(pool.late))
        finally:
            reason = f"stopped by {caught[0].name}" if caught else "the sweep broke off"
            pool.stop(reason, hurry=lambda: len(caught) > 1)
        if caught:
            display.say(f"{reason}; the same command goes on from here")
            raise SystemExit(128 + caught[0])
    return [run.seen() for run in runs]


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[signal.Signals]]:
    """The STOP_SIGNALS that arrive meanwhile, in a list, instead of their usual effect."""
    caught: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Active:
    """A task with its current attempt."""

    task: Task
    attempt: Attempt


@dataclass(kw_only=True)
class _Pool:
    display: Display
    limits: Limits
    slots: list[Slot]
    """The free slots."""
    queue: list[Task] = field(default_factory=list)
    """The tasks that are not started, in the order in which they start; one that waits is passed over."""
    active: list[_Active] = field(default_factory=list)
    late: list[RunDir] = field(default_factory=list)
    """The runs for which Limits.until leaves no time."""

    def enqueue(self, runs: Sequence[RunDir], *, force: bool) -> None:
        skipped = 0
        for run in runs:
            status = run.seen()
            if status["reason"] == CANCELLED:  # by an earlier `hqsweep cancel`; a later one is for this sweep
                status = run.write_status(state="pending", reason=None)
            self._show(run, status)
            if force or status["state"] != "finished":
                self._enqueue(run, reset=force)
            else:
                skipped += 1
                self._learn(run, status)
        if skipped:
            self.display.say(f"{skipped} of {len(runs)} runs are finished already and skipped; --force repeats them")
        if waiting := [task.trunk for task in self.queue if task.trunk and not is_point(task.needs)]:
            self.display.say(f"{len(waiting)} forks wait for {len(set(waiting))} trunks")

    def announce(self) -> None:
        """Say what takes the seconds before the first step."""
        if self.queue:
            todo, workers = len(self.queue), min(len(self.slots), len(self.queue))
            which = f"{workers} workers" if workers > 1 else "a worker"
            self.display.say(f"{todo} run{'s' * (todo > 1)} to do, {workers} at a time; starting {which}")

    def _enqueue(self, run: RunDir, *, reset: bool) -> None:
        """Enqueue the run's task, unless its config is unknown."""
        try:
            self.queue.append(Task.of(run, reset=reset))
        except Damaged as fault:
            reason = GONE if isinstance(fault, Missing) else str(fault)
            self._show(run, PENDING | {"state": "failed", "reason": reason})

    def busy(self) -> bool:
        return bool(self.queue or self.active)

    def turn(self) -> None:
        """Look at active runs, clear away ended ones, and start the next."""
        for active in list(self.active):
            if not active.attempt.alive():
                self._end(active)
            elif self.limits.timeout_s is not None and active.attempt.seconds > self.limits.timeout_s:
                active.attempt.stop("failed", f"timed out after {self.limits.timeout_s:g} s")
            elif active.task.due():
                self._look_at(active)
        if self.limits.until and not self.limits.until.left:
            self._put_off(list(self.queue))
        for task in [task for task in self.queue if not task.ready and task.due()]:
            self._look_for_trunk(task)
        for task in [task for task in self.queue if task.ready]:
            if not self.slots:
                break
            if task.due() and self._in_time(task):
                self._try_start(task)
        if not self.queue:
            self._clear()

    def wait(self) -> None:
        """Wait POLL_S seconds, or until a worker answers or dies."""
        workers = [active.attempt.worker for active in self.active]
        wait([worker.channel for worker in workers if worker.answers], POLL_S)

    def stop(self, reason: str, hurry: Callable[[], bool]) -> None:
        """Stop all workers and wait for their end; `hurry` says whether to kill them instead."""
        for active in self.active:
            active.attempt.stop("interrupted", reason)
        while any([active.attempt.alive() for active in self.active]):
            if hurry():
                for active in self.active:
                    active.attempt.kill()
            time.sleep(POLL_S)
        self._clear()
        for run, status in [(active.task.run, active.attempt.settle()) for active in self.active]:
            self._show(run, status)

    def _clear(self) -> None:
        """End the workers that wait for a run."""
        for slot in self.slots:
            slot.clear()

    def _show(self, run: RunDir, status: dict[str, Any]) -> None:
        self.display.update(run.name, status)

    def _look_at(self, active: _Active) -> None:
        """Show the run at work. While its files are unreadable, the display keeps the last status.

        A run whose folder was deleted is stopped. A worker that was stopped by a signal is named once.
        """
        status, attempt = active.task.run.seen(), active.attempt
        if status["state"] == "missing":
            attempt.stop("failed", DELETED)
        elif status["state"] != "damaged":
            self._show(active.task.run, status)
        if (pid := attempt.stalled()) is not None:
            whose = "its worker" if pid == attempt.worker.pid else "one of its ranks"
            self.display.say(
                f"{active.task.run.name}: {whose}, process {pid}, is stopped; `kill -CONT {pid}` lets it go on"
            )

    def _look_for_trunk(self, task: Task) -> None:
        """Make a fork ready if its trunk has reached its point; end it if no process trains its trunk any further."""
        before = [other for other in self.queue if other.run == task.trunk]
        trained = before or any(active.task.run == task.trunk for active in self.active)
        end = None if trained else end_without(task.trunk)
        if is_point(task.needs) and not any(other.reset for other in before):
            task.make_ready()
            status = task.run.seen()
            if status["state"] == "pending" and not status["reason"]:
                self._show(task.run, status | {"reason": FOR_WORKER})
        elif end is None:
            self._wait(task)
        else:
            self.queue.remove(task)
            status = self._settle_unstarted(task, *end)
            self._show(task.run, status)
            self._stop_after(task.run, status)

    def _wait(self, task: Task) -> None:
        """Show once that the fork waits. It is pending, whatever its state was in an earlier sweep."""
        if not task.announced:
            task.announced = True
            status = self._settle_unstarted(task, "pending", None)
            self._show(task.run, status | {"state": "pending", "reason": f"waits for {task.trunk.name}"})

    def _settle_unstarted(self, task: Task, state: str, reason: str | None) -> dict[str, Any]:
        """The status of a run that is not started, written unless it was cancelled or is another process's."""
        status = task.run.seen()
        states = ("running", state) if task.reset else ("running", state, "finished")
        if status["state"] in states or status["reason"] == CANCELLED:
            return status
        with contextlib.suppress(Busy, OSError, Damaged), task.run.lock():
            status = task.run.write_status(state=state, reason=reason)
        return status

    def _in_time(self, task: Task) -> bool:
        """Whether there is time for the task; if not, it and the forks that wait for it are put off."""
        if self.limits.until is None or self.limits.until.allows(task.run):
            return True
        self._put_off([other for other in self.queue if other is task or (other.trunk == task.run and not other.ready)])
        return False

    def _put_off(self, tasks: Sequence[Task]) -> None:
        """Leave the tasks to the next command, pending; a finished run that was to be repeated stays as it is."""
        for task in tasks:
            self.queue.remove(task)
            status = task.run.seen()
            if status["state"] != "finished":
                status = self._settle_unstarted(task, "pending", None)
            self._show(task.run, status)
            if status["state"] == "pending" or task.reset:
                self.late.append(task.run)

    def _learn(self, run: RunDir, status: dict[str, Any]) -> None:
        """Take note of what a finished run took."""
        if self.limits.until and status["state"] == "finished":
            self.limits.until.learn(run, status["seconds"])

    def _try_start(self, task: Task) -> None:
        """Start the task unless its run is finished or cancelled, or another process works on it."""
        status = task.run.seen()
        done = status["state"] == "finished" and not task.reset
        if done or status["reason"] == CANCELLED:
            self.queue.remove(task)
            self._show(task.run, status)
            return
        try:
            slot = min(self.slots, key=lambda slot: slot.idle is None)
            status = self._prepare(task, phase="starting a worker" if slot.idle is None else None)
            attempt = Attempt(task.run, slot)
        except Busy:
            self._leave_to_other(task, status)
            return
        except (OSError, Damaged) as error:
            self.queue.remove(task)
            why = GONE if task.run.seen()["state"] == "missing" else f"cannot be started: {error}"
            self._show(task.run, status := status | {"state": "failed", "reason": why})
            self._stop_after(task.run, status)
            return
        self.queue.remove(task)
        self._show(task.run, status)
        self.slots.remove(slot)
        self.active.append(_Active(task=task, attempt=attempt))

    def _prepare(self, task: Task, phase: str | None) -> dict[str, Any]:
        """Make the run pending, for a worker of ours; returns its status."""
        with task.run.lock():
            if task.reset:
                task.run.reset()
            return task.run.write_status(state="pending", reason=None, phase=phase)

    def _leave_to_other(self, task: Task, status: dict[str, Any]) -> None:
        self._show(task.run, status)
        if not task.announced:
            self.display.say(f"{task.run.name}: another process works on it; waiting for that")
            task.announced, task.name_at = True, time.monotonic() + NAMED_S
        elif time.monotonic() >= task.name_at:
            self.display.say(f"{task.run.name}: {holder(task.run.lock_path)}")
            task.name_at = float("inf")

    def _end(self, active: _Active) -> None:
        """Give the slot back; the run has ended, or goes to the queue again."""
        self.active.remove(active)
        self.slots.append(active.attempt.slot)
        task = active.task
        for fork in self.queue:
            if fork.trunk == task.run:  # which comes before the runs behind it, as soon as its trunk has ended
                fork.look_at = 0.0
        if active.attempt.exit_code == EXIT_BUSY and task.run.seen()["state"] != "missing":
            self.queue.insert(0, task)
            return
        status = active.attempt.settle()
        self._show(task.run, status)
        self._learn(task.run, status)
        if status["state"] == "failed" and task.failures < self.limits.retries:
            self._retry(task, status["reason"])
        else:
            self._stop_after(task.run, status)

    def _stop_after(self, run: RunDir, status: dict[str, Any]) -> None:
        """Empty the queue, with fail_fast, where a run has failed for good."""
        if self.limits.fail_fast and self.queue and status["state"] == "failed":
            left = f"{len(self.queue)} runs are not started (engine.fail_fast)"
            self.display.say(f"{run.name}: {status['reason']}; {left}")
            self.queue.clear()

    def _retry(self, task: Task, reason: str) -> None:
        wait_s = self.limits.backoff_s * 2**task.failures
        self.display.say(f"{task.run.name}: {reason}; trying again in {wait_s:g} s")
        task.failures, task.reset, task.look_at = task.failures + 1, False, time.monotonic() + wait_s
        self.queue.insert(0, task)
