"""engine=slurm: each run is a task of a Slurm array, submitted by submitit.

The forks of an arm from one trunk share a task, which starts after the trunk's task. A run's folder has the id of its
job, so the same command again finds waiting and running jobs, and follows them instead of submitting twice. No process
here has to stay alive: jobs go on without it.
"""

import io
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hqsweep.errors import EXIT_FAILED, UserError
from hqsweep.host import Busy
from hqsweep.sweep.console import Display, PlainDisplay, SafeConsole
from hqsweep.sweep.engine.follow import find_jobs, follow, job_ids, requeue_job
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.ranks import Meeting, help_out, nodes_arguments
from hqsweep.sweep.store.files import write_json
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

ARRAY_SIZE = 1000
"""The tasks of one array: Slurm's default limit (MaxArraySize is 1001)."""


def run_slurm(
    runs: Sequence[RunDir],
    *,
    display: Display,
    slurm: Mapping[str, Any],
    workers: int | None = None,
    threads: int | None = None,
    ranks: int = 1,
    force: bool = False,
    **options: Any,
) -> None:
    """Submit every run that is not finished and has no live job, then follow all to their ends, or with slurm["detach"]
    return at once.

    slurm      the config's section engine.slurm
    workers    tasks at a time, but at least one for each trunk whose forks wait; None is any number
    threads    CPU threads per run on a machine; None is one for each of its ranks
    ranks      of a run, on slurm["nodes"] machines
    options    timeout_s, retries and backoff_s, as in Limits

    Raises UserError when Slurm does not take the jobs.
    """
    check_slurm(runs[0].sweep_path)
    store, sweep = RunStore(runs[0].sweep_path.parent), runs[0].sweep
    with store.lock(sweep, display.say):
        live = _live(runs)
        todo = _prepare(runs, live, force)
        shared = {"threads": threads or ranks // slurm["nodes"], **options}
        waiting = _by_trunk(todo, {*todo, *live})
        _submit(_tasks(waiting.pop(None, [])), slurm, workers, shared)
        for trunk, forks in waiting.items():
            after = slurm | {"after": job_ids([trunk])[trunk]}
            _submit(_tasks(forks), after, workers and max(1, workers // len(waiting)), shared)
    display.say(f"{len(todo)} of {len(runs)} runs submitted to Slurm")
    if slurm["detach"]:
        display.say(f"hqsweep status {sweep} follows them, hqsweep cancel {sweep} takes them back")
    else:
        follow(runs, display)


def check_slurm(sweep_path: Path) -> None:
    """Raise UserError if submitit is missing, or Slurm would misread the path of a sweep's folder.

    A line break ends a line of the script, and both replace %j and the like by facts of a job.
    """
    if find_spec("submitit") is None:
        raise UserError("engine.kind: 'slurm' needs submitit; pip install 'hqsweep[slurm]', or set engine=local")
    path = str(sweep_path.resolve())
    if not path.isprintable():
        raise UserError(f"runs_dir: {path!r} has a control character, which no script of Slurm can hold")
    if "%" in path:
        raise UserError(
            f"runs_dir: '{path}' has a '%', by which Slurm means facts of a job, as in %j; give a folder without, such"
            " as runs_dir=runs"
        )


def _live(runs: Sequence[RunDir]) -> set[RunDir]:
    """The runs whose jobs wait or run."""
    names = job_ids(runs)
    live = {name for name, job in find_jobs(names.values()).items() if job.live}
    return {run for run, name in names.items() if name in live}


def _prepare(runs: Sequence[RunDir], live: Collection[RunDir], force: bool) -> list[RunDir]:
    """The runs to submit, made pending."""
    todo = []
    for run in runs:
        try:
            with run.lock():
                if run in live or (run.seen()["state"] == "finished" and not force):
                    continue
                if force:
                    run.reset()
                run.write_status(state="pending", reason=None)
                todo.append(run)
        except Busy:
            continue
    return todo


def _by_trunk(todo: Sequence[RunDir], coming: Collection[RunDir]) -> dict[RunDir | None, list[RunDir]]:
    """Return the runs to submit by the trunk whose job they must wait for; None for runs that can start.

    coming: the runs that have a job, or will have one.
    """
    groups: dict[RunDir | None, list[RunDir]] = {}
    for run in todo:
        trunk = run.trunk()
        waits = trunk in coming and not run.trunk_state().exists()
        groups.setdefault(trunk if waits else None, []).append(run)
    return groups


def _tasks(runs: Sequence[RunDir]) -> list[list[RunDir]]:
    """One list for each task: the forks of an arm from the same trunk, or any other run alone."""
    tasks: dict[tuple[str, ...], list[RunDir]] = {}
    for run in runs:
        manifest = run.manifest()
        key = (manifest["trunk"], manifest["arm"]) if "trunk" in manifest else (run.name,)
        tasks.setdefault(key, []).append(run)
    return list(tasks.values())


def _submit(
    tasks: Sequence[Sequence[RunDir]], slurm: Mapping[str, Any], workers: int | None, options: dict[str, Any]
) -> None:
    """Submit the tasks as arrays, and write each run's job.json."""
    for start in range(0, len(tasks), ARRAY_SIZE):
        part = tasks[start : start + ARRAY_SIZE]
        for task, name in zip(part, _submit_array(part, slurm, workers, options), strict=True):
            for run in task:
                write_json(run.job_path, {"id": name})


def _submit_array(
    tasks: Sequence[Sequence[RunDir]], slurm: Mapping[str, Any], workers: int | None, options: dict[str, Any]
) -> list[str]:
    """The ids of the tasks of one array (of a plain job for a single task)."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    paths = [[run.path.resolve() for run in task] for task in tasks]
    limit_s = slurm["time_min"] * 60.0 - slurm["signal_s"] if slurm["time_min"] else None
    said = io.StringIO()  # submitit repeats there what sbatch says
    try:
        executor = SlurmExecutor(paths[0][0].parent / "slurm")
        executor.update_parameters(**sbatch_parameters(tasks[0][0].sweep, slurm, workers, options["threads"]))
        with redirect_stderr(said):
            jobs = executor.map_array(work, paths, [limit_s] * len(paths), [options] * len(paths))
    except (RuntimeError, FailedJobError, FailedSubmissionError) as error:
        why = "; ".join(line.removeprefix("sbatch: error: ") for line in said.getvalue().splitlines()) or str(error)
        raise UserError(f"engine: Slurm did not take the jobs: {why}") from None
    return [job.job_id for job in jobs]


def sbatch_parameters(sweep: str, slurm: Mapping[str, Any], workers: int | None, threads: int) -> dict[str, Any]:
    """The arguments of submitit for the config's section engine.slurm, where `after` is the job that has to finish
    before. A key that is None is left out of the script; without the key, submitit would write its own default (5
    minutes, a wckey)."""
    further: dict[str, Any] = {"requeue": True}
    for word in shlex.split(slurm["options"] or ""):
        name, equals, value = word.removeprefix("--").partition("=")
        further[name] = value if equals else True
    if "after" in slurm:  # a job that can never start, because the other failed, is to end instead of waiting
        others = [further["dependency"]] if "dependency" in further else []
        further |= {"dependency": ",".join([f"afterok:{slurm['after']}", *others]), "kill-on-invalid-dep": "yes"}
    several = {"nodes": slurm["nodes"], "ntasks_per_node": 1} if slurm["nodes"] > 1 else {}
    return several | {
        "job_name": f"hqsweep-{sweep}", "partition": slurm["partition"], "gres": slurm["gres"],
        "mem": f"{slurm['mem_gb'] * 1024:.0f}M" if slurm["mem_gb"] else None, "time": slurm["time_min"],
        "signal_delay_s": slurm["signal_s"], "cpus_per_task": threads, "array_parallelism": workers or ARRAY_SIZE,
        "wckey": None, "stderr_to_stdout": True, "additional_parameters": further,
    }  # fmt: skip


FIRST_PORT, PORTS = 20_000, 10_000
"""The ports of the first machine. A job on several machines takes one of them by its id."""
NEAR_LIMIT_S = 30.0
"""The seconds by which Slurm may send the signal earlier than announced (it checks in steps of up to a minute)."""


def work(paths: Sequence[Path], limit_s: float | None, options: dict[str, Any]) -> None:
    """Do this machine's part of a job: the first machine brings the runs in these folders to their ends, as
    bring_to_end does; the others launch their ranks of these runs."""
    count = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if count == 1:
        bring_to_end(paths, limit_s, options)
        return
    from submitit import JobEnvironment

    job = JobEnvironment()
    endpoint = f"{job.hostnames[0]}:{FIRST_PORT + int(os.environ['SLURM_JOB_ID']) % PORTS}"
    if job.global_rank:
        help_out(count, endpoint)
        return
    meeting = Meeting(endpoint, serves=True)
    try:
        bring_to_end(paths, limit_s, options | {"nodes": nodes_arguments(count, endpoint)})
    finally:
        meeting.finish()


def bring_to_end(paths: Sequence[Path], limit_s: float | None, options: dict[str, Any]) -> None:
    """Bring the runs in these folders to their ends; `options` are fields of Limits. In a requeued job, failed runs are
    not repeated while other runs remain.

    limit_s: seconds after which Slurm tells the job that its time is nearly over; None without a limit. Raises
    SystemExit unless all runs finish.
    """
    runs, began = [RunDir(path) for path in paths], time.monotonic()
    before = _achieved(runs)
    todo = [run for run in runs if run.seen()["state"] != "failed"] or runs
    try:
        run_local(todo, display=PlainDisplay(SafeConsole()), limits=Limits(workers=1, **options))
    except SystemExit:
        job = find_jobs([os.environ["SLURM_JOB_ID"]]).get(os.environ["SLURM_JOB_ID"])
        if job is None or job.state != "RUNNING":  # cancelled, or Slurm itself puts it back
            raise
        used_s = time.monotonic() - began
        if limit_s is not None and used_s > limit_s - NEAR_LIMIT_S and _achieved(runs) == before:
            _give_up([run for run in todo if run.seen()["state"] == "interrupted"], used_s)
            if not any(run.seen()["state"] == "pending" for run in todo):
                raise SystemExit(EXIT_FAILED) from None
        requeue_job(job.id)
        raise
    if not all(run.has_finished() for run in runs):
        raise SystemExit(EXIT_FAILED)


def _achieved(runs: Sequence[RunDir]) -> list[tuple[bool, list[str]]]:
    """For each run, whether it has ended, and its checkpoints."""
    ends = [run.seen()["state"] in ("finished", "failed") for run in runs]
    checkpoints = [sorted(path.name for path in run.checkpoint.glob("step_*.json")) for run in runs]
    return list(zip(ends, checkpoints, strict=True))


def _give_up(runs: Sequence[RunDir], used_s: float) -> None:
    """Fail the runs at work, which would be the same in the next job."""
    for run in runs:
        with run.lock(wait_s=1.0):
            run.write_status(
                state="failed", exit_code=EXIT_FAILED,
                reason=f"no new checkpoint in the {used_s:.0f} s of its Slurm job; raise engine.slurm.time_min or lower"
                " train.checkpoint_every",
            )  # fmt: skip
