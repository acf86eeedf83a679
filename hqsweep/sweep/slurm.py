"""engine=slurm: a task of a Slurm array for each run, submitted by submitit.

A run's folder keeps the id of its job, so the same command again finds the jobs that wait or run and follows them
instead of submitting a second time. Nothing here has to stay alive: jobs go on without us.
"""

import io
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from typing import Any

from hqsweep.errors import UserError
from hqsweep.sweep.files import write_json
from hqsweep.sweep.follow import follow, job_ids
from hqsweep.sweep.locks import RunBusy
from hqsweep.sweep.progress import Display
from hqsweep.sweep.scheduler import find_jobs
from hqsweep.sweep.slurm_job import work
from hqsweep.sweep.store import RunDir, RunStore

ARRAY_SIZE = 1000
"""Tasks of one array: what Slurm takes by default (MaxArraySize is 1001)."""


def run_slurm(
    runs: Sequence[RunDir],
    *,
    display: Display,
    slurm: Mapping[str, Any],
    workers: int | None = None,
    threads: int | None = None,
    force: bool = False,
    **options: Any,
) -> None:
    """Submit every run that is not finished and has no live job, then follow all to their ends, or with slurm["detach"]
    return at once.

    slurm      the config's section engine.slurm
    workers    tasks of an array at a time; None is any number
    threads    CPU threads per run; None is 1
    options    timeout_s, retries and backoff_s, as in Limits

    Raises UserError when Slurm does not take the jobs.
    """
    if find_spec("submitit") is None:
        raise UserError("engine.kind: 'slurm' needs submitit; pip install 'hqsweep[slurm]', or set engine=local")
    store, sweep = RunStore(runs[0].sweep_path.parent), runs[0].sweep
    with store.lock(sweep):
        todo = _prepare(runs, force)
        for start in range(0, len(todo), ARRAY_SIZE):
            part = todo[start : start + ARRAY_SIZE]
            _submit(part, slurm, workers, {"threads": threads or 1, **options})
    display.say(f"{len(todo)} of {len(runs)} runs submitted to Slurm")
    if slurm["detach"]:
        display.say(f"hqsweep status {sweep} follows them, hqsweep cancel {sweep} takes them back")
    else:
        follow(runs, display)


def _prepare(runs: Sequence[RunDir], force: bool) -> list[RunDir]:
    """The runs to submit, made pending."""
    names = job_ids(runs)
    live = {name for name, job in find_jobs(names.values()).items() if job.live}
    todo = []
    for run in runs:
        try:
            with run.lock():
                if names.get(run) in live or (run.written_status()["state"] == "finished" and not force):
                    continue
                if force:
                    run.reset()
                run.write_status(state="pending", reason=None)
                todo.append(run)
        except RunBusy:
            continue
    return todo


def _submit(runs: Sequence[RunDir], slurm: Mapping[str, Any], workers: int | None, options: dict[str, Any]) -> None:
    """One array (a plain job for a single run), and each run's job.json."""
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    paths = [run.path.resolve() for run in runs]
    limit_s = slurm["time_min"] * 60.0 - slurm["signal_s"] if slurm["time_min"] else None
    said = io.StringIO()  # submitit repeats there what sbatch says
    try:
        executor = SlurmExecutor(paths[0].parent / "slurm")
        executor.update_parameters(**sbatch_parameters(runs[0].sweep, slurm, workers, options["threads"]))
        with redirect_stderr(said):
            jobs = executor.map_array(work, paths, [limit_s] * len(paths), [options] * len(paths))
    except (RuntimeError, FailedJobError, FailedSubmissionError) as error:
        why = "; ".join(line.removeprefix("sbatch: error: ") for line in said.getvalue().splitlines()) or str(error)
        raise UserError(f"engine: Slurm did not take the jobs: {why}") from None
    for run, job in zip(runs, jobs, strict=True):
        write_json(run.job_path, {"id": job.job_id})


def sbatch_parameters(sweep: str, slurm: Mapping[str, Any], workers: int | None, threads: int) -> dict[str, Any]:
    """What submitit takes for the config's section engine.slurm. A key that is None is not written into the script;
    without that, submitit's own defaults (5 minutes, a wckey) would be."""
    further: dict[str, Any] = {"requeue": True}
    for word in shlex.split(slurm["options"] or ""):
        name, equals, value = word.removeprefix("--").partition("=")
        further[name] = value if equals else True
    return {
        "job_name": f"hqsweep-{sweep}", "partition": slurm["partition"], "gres": slurm["gres"],
        "mem": f"{slurm['mem_gb'] * 1024:.0f}M" if slurm["mem_gb"] else None, "time": slurm["time_min"],
        "signal_delay_s": slurm["signal_s"], "cpus_per_task": threads, "array_parallelism": workers or ARRAY_SIZE,
        "wckey": None, "stderr_to_stdout": True, "additional_parameters": further,
    }  # fmt: skip
