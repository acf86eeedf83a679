"""engine=slurm on a real one-node Slurm, with workers that need no torch; skipped where there can be none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.sweep import fake_worker, slurm_cluster
from support.sweep.shown import Shown

from hqsweep.errors import UserError
from hqsweep.sweep.engine import follow, launch, process, slurm
from hqsweep.sweep.engine.follow import Job
from hqsweep.sweep.engine.ranks import nodes_arguments
from hqsweep.sweep.engine.slurm import run_slurm, sbatch_parameters
from hqsweep.sweep.store.store import RunStore

pytest.importorskip("submitit")

pytestmark = pytest.mark.slow

SECTION = {"partition": None, "gres": None, "mem_gb": None, "time_min": None, "nodes": 1, "signal_s": 60,
           "options": None, "detach": False}  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def submit(environment, monkeypatch):
    """submit(runs, detach=True, ...): run_slurm with fake workers; keys of engine.slurm are given as such."""
    for name, value in (environment | {"PYTHONPATH": str(Path(__file__).parents[2])}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(slurm, "work", fake_worker.work_in_slurm)
    monkeypatch.setattr(follow, "ASK_S", 0.5)

    def call(runs, **keys):
        section = SECTION | {key: keys.pop(key) for key in keys.keys() & SECTION.keys()}
        run_slurm(runs, display=(display := Shown()), slurm=section, **keys)
        return display.lines

    return call


def starts(run) -> int:
    path = run.path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def slurm_says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_runs_end_each_in_its_way_and_the_same_call_repeats_what_is_not_finished(make_runs, submit):
    runs = make_runs("quick", "raise", "segv", "kill", "orphan", "sleep")
    began = time.monotonic()
    assert submit(runs, timeout_s=6, retries=0, backoff_s=1)[0] == "6 of 6 runs submitted to Slurm"
    assert time.monotonic() - began < 60
    job = follow.job_ids(runs)[runs[4]]
    assert [(run.status()["state"], run.status()["reason"]) for run in runs] == [
        ("finished", None),
        ("failed", "RuntimeError: out of luck"),
        ("failed", "killed by SIGSEGV"),
        ("failed", "killed by SIGKILL"),
        ("failed", f"Slurm job {job}: FAILED, killed by SIGKILL"),
        ("failed", "timed out after 6 s"),
    ]
    lines = submit(runs[:2], retries=1, backoff_s=0.1)
    assert lines[0] == "1 of 2 runs submitted to Slurm"
    assert [starts(run) for run in runs[:2]] == [1, 3]


def test_a_job_that_is_told_to_stop_or_preempted_goes_on_later(make_runs, submit):
    runs = make_runs("again", "again")
    submit(runs, gres="gpu:1", detach=True)
    wait_for(lambda: all(run.status()["state"] == "running" for run in runs))
    assert {(run.path / "starts").read_text().strip() for run in runs} == {"1 0", "1 1"}
    assert submit(runs, detach=True)[0] == "0 of 2 runs submitted to Slurm"
    told, _ = (follow.job_ids(runs)[run] for run in runs)
    began = time.monotonic()
    slurm_says("scancel", "--signal=USR2", told)
    wait_for(lambda: runs[0].status()["state"] == "interrupted")
    slurm_says("srun", "-p", "urgent", "-c", str(slurm_cluster.CPUS), "true")
    submit(runs)  # follows both to their ends
    assert time.monotonic() - began < 60
    assert [(run.status()["state"], run.status()["attempt"], starts(run)) for run in runs] == [("finished", 2, 2)] * 2


PROGRAM = """
import json, os, sys
recipe, seed, folder = sys.argv[1:]
gap = {"0": 0.002, "1": -0.002}.get(seed, 0.0) if recipe == "new" else 0.0
if recipe == "new" and not os.path.exists(f"{folder}/tried"):
    open(f"{folder}/tried", "w").close()
    sys.exit(9)
for step in (10, 20):
    print(json.dumps({"step": step, "val_loss": 3 + int(seed) / 10 + gap}), flush=True)
"""


def test_a_program_of_ones_own_is_repeated_followed_and_run_until_it_is_decided(environment, tmp_path):
    """conf=command by its own worker: a grid, a program that fails at first, and more seeds while a verdict lacks."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["conf=command", "sweep=mine", f"command={sys.executable} program.py {{recipe}} {{seed}} {{run_dir}}"]
    words += ["recipe=old,new", "seed=0", "engine=slurm", "engine.retries=1", "engine.backoff_s=0.1"]
    words += ["seeds.until=decided", "seeds.max=4"]

    def run() -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "hqsweep", "run", *words]
        names = os.environ | environment | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=names, capture_output=True, text=True, timeout=300)

    done = run()
    assert done.returncode == 0 and "every arm has a verdict" in done.stdout, done.stdout + done.stderr
    assert "new undecided; adding seed 2" in done.stdout and "equivalent to 'old'" in done.stdout
    runs = RunStore(tmp_path / "runs").runs("mine")
    attempts = {run.manifest()["arm"]: run.written_status()["attempt"] for run in runs}
    assert len(runs) == 6 and attempts == {"old": 1, "new": 2} and all(run.job() for run in runs)
    statuses = [run.written_status() for run in runs]
    assert (again := run()).returncode == 0 and "every arm has a verdict" in again.stdout
    assert [run.written_status() for run in runs] == statuses


def test_cancel_takes_back_what_waits_and_what_runs(make_runs, submit, store):
    runs = make_runs("sleep", "sleep")
    submit(runs, workers=1, detach=True)
    wait_for(lambda: runs[0].status()["state"] == "running")
    rows = follow.status_rows(runs)
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("running", None), ("pending", f"Slurm job {rows[1]['job']}: JobArrayTaskLimit")
    ]  # fmt: skip
    assert follow.cancel(runs) == runs
    assert [row["state"] for row in follow.status_rows(runs)] == ["interrupted"] * 2
    wait_for(lambda: not slurm_says("squeue", "-h"))
    assert starts(runs[1]) == 0


def test_forks_of_an_arm_share_a_task_that_starts_when_their_trunk_has_finished(make_forks, submit):
    runs = make_forks("trunk", "quick", "quick", seeds=2)
    assert submit(runs, detach=True)[0] == "10 of 10 runs submitted to Slurm"
    jobs = follow.job_ids(runs)
    assert len({jobs[run] for run in runs}) == 2 + 4
    for first, second in zip(runs[2::2], runs[3::2], strict=True):
        assert jobs[first] == jobs[second] and first.manifest()["arm"] == second.manifest()["arm"]
    assert submit(runs)[0] == "0 of 10 runs submitted to Slurm"  # follows what is there
    assert [(run.status()["state"], starts(run)) for run in runs] == [("finished", 1)] * 10
    pids = [run.status()["pid"] for run in runs]
    assert pids[2] == pids[3] != pids[4] == pids[5]


def test_forks_of_a_trunk_that_fails_on_slurm_say_so_and_are_repeated_with_it(make_forks, submit):
    trunk, *forks = runs = make_forks("trunk-fails", "quick", "quick")
    began = time.monotonic()
    submit(runs)
    assert time.monotonic() - began < 90
    reason = f"its trunk {trunk.name} failed: RuntimeError: out of luck"
    assert [(run.status()["state"], run.status()["reason"]) for run in forks] == [("failed", reason)] * 4
    assert [starts(fork) for fork in forks] == [0] * 4
    (trunk.path / "mended").touch()
    assert submit(runs)[0] == "5 of 5 runs submitted to Slurm"
    assert [(run.status()["state"], starts(run)) for run in forks] == [("finished", 1)] * 4


def test_a_trunk_that_goes_back_to_the_queue_keeps_its_forks_waiting(make_forks, submit):
    trunk, *forks = runs = make_forks("trunk-sleeps", "quick")
    submit(runs, detach=True)
    wait_for(lambda: (trunk.checkpoint / "step_1.pt").exists())
    waits = [(row["state"], row["reason"]) for row in follow.status_rows(forks)]
    assert waits == [("pending", f"waits for {trunk.name}")] * 2
    trunk.config_path.write_text(trunk.config_path.read_text().replace("trunk-sleeps", "trunk"))
    slurm_says("scancel", "--signal=USR2", follow.job_ids(runs)[trunk])
    submit(runs)
    assert [run.status()["state"] for run in runs] == ["finished"] * 3
    assert trunk.status()["attempt"] == 2


def test_a_cancelled_fork_takes_along_those_that_share_its_task_and_a_cancelled_trunk_all(make_forks, submit):
    trunk, *forks = runs = make_forks("trunk-sleeps", "quick", "quick")
    submit(runs, detach=True)
    wait_for(lambda: trunk.status()["state"] == "running")
    assert follow.cancel([forks[1]]) == [forks[1], forks[0]]
    assert follow.cancel([trunk]) == [trunk]
    wait_for(lambda: not slurm_says("squeue", "-h"))
    reasons = [row["reason"] for row in follow.status_rows(runs)]
    assert reasons == ["cancelled"] * 3 + [f"its trunk {trunk.name} was cancelled"] * 2


def test_slurm_that_refuses_is_one_sentence(make_runs, submit, capfd):
    (run,) = make_runs("quick")
    with pytest.raises(UserError, match=r"^engine: Slurm did not take the jobs: invalid partition specified: none; "):
        submit([run], partition="none")
    assert not run.job_path.exists()
    assert capfd.readouterr().err == ""


def test_what_sbatch_is_given():
    section = SECTION | {"time_min": 90, "mem_gb": 1.5, "options": "--account=lab --exclusive"}
    parameters = sbatch_parameters("grid", section, None, 4)
    assert parameters["additional_parameters"] == {"requeue": True, "account": "lab", "exclusive": True}
    after = sbatch_parameters("grid", section | {"options": "--dependency=singleton", "after": "7_2"}, None, 4)
    assert after["additional_parameters"] == {
        "requeue": True, "dependency": "afterok:7_2,singleton", "kill-on-invalid-dep": "yes"
    }  # fmt: skip
    assert (parameters["time"], parameters["mem"], parameters["cpus_per_task"], parameters["job_name"]) == (
        90,
        "1536M",
        4,
        "hqsweep-grid",
    )
    many = sbatch_parameters("grid", section | {"nodes": 3}, None, 4)
    assert "nodes" not in parameters and (many["nodes"], many["ntasks_per_node"]) == (3, 1)


def test_without_slurm_and_without_submitit_one_sentence_each(make_runs, monkeypatch, tmp_path):
    (run,) = make_runs("quick")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r'engine: Slurm did not take the jobs: .*"srun"'):
        run_slurm([run], display=Shown(), slurm=SECTION)
    monkeypatch.setattr(slurm, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"engine\.kind: 'slurm' needs submitit; pip install"):
        run_slurm([run], display=Shown(), slurm=SECTION)


@pytest.mark.parametrize("name", ["part_%u_%j", "100%", "a%%b", "line\nbreak"])
def test_a_path_that_slurm_would_change_is_refused_before_anything_is_written(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    words = ["conf=markov", "sweep=p", "recipe=bf16", "seed=0", "null_arm=false", "track=none", "engine=slurm"]
    for place, word in ((tmp_path, f"runs_dir='{name}'"), (tmp_path / name, "runs_dir=runs")):
        monkeypatch.chdir(place)
        if "\n" in word:
            continue  # no word of a command line
        with pytest.raises(UserError, match=r"runs_dir: .* has a (control character|'%', by which Slurm means facts)"):
            launch.start(launch.plan([*words, word]), Shown())
    assert [path.name for path in tmp_path.rglob("*")] == [name]


@pytest.fixture
def requeued(monkeypatch):
    """Ids of the jobs put back; the job itself is told to stop while its worker runs."""
    names = []
    monkeypatch.setattr(process, "worker_command", fake_worker.command)
    monkeypatch.setattr(slurm, "requeue_job", names.append)
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    return names


def say(monkeypatch, state):
    job = Job(id="6", state=state, reason="", exit_code=0, signal=0, ended_s=0.0)
    monkeypatch.setattr(slurm, "find_jobs", lambda ids: {"6": job})


@pytest.fixture
def told_to_stop(monkeypatch):
    class Told(slurm.PlainDisplay):
        def update(self, run, status):
            if status["state"] == "running":
                os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(slurm, "PlainDisplay", Told)


@pytest.mark.parametrize(
    ("state", "limit_s", "names", "outcome"),
    [
        ("RUNNING", None, ["6"], ("interrupted", "stopped by SIGUSR2")),
        ("RUNNING", 1000.0, ["6"], ("interrupted", "stopped by SIGUSR2")),
        ("RUNNING", 20.0, [], ("failed", "no new checkpoint in the")),
        ("CANCELLED", None, [], ("interrupted", "stopped by SIGUSR2")),
    ],
    ids=["preempted", "long before its limit", "no checkpoint within its limit", "cancelled"],
)
def test_a_stopped_job(make_runs, monkeypatch, requeued, told_to_stop, state, limit_s, names, outcome):
    (run,) = make_runs("sleep")
    say(monkeypatch, state)
    with pytest.raises(SystemExit):
        slurm.work([run.path], limit_s, {})
    assert requeued == names
    assert run.status()["state"] == outcome[0] and run.status()["reason"].startswith(outcome[1])


@pytest.mark.feature("H26")
@pytest.mark.parametrize("rank", [0, 1])
def test_machines_of_a_job_meet_at_its_first_one_at_a_port_that_its_id_gives(monkeypatch, rank):
    """The first brings the runs to their ends, with the arguments by which their ranks find each other; others help."""
    said, port = [], slurm.FIRST_PORT + 70_003 % slurm.PORTS

    class Meeting:
        def __init__(self, endpoint, serves):
            said.append(("meets", endpoint, serves))

        def finish(self):
            said.append("finished")

    job = SimpleNamespace(hostnames=["node7", "node8"], global_rank=rank)
    monkeypatch.setattr("submitit.JobEnvironment", lambda: job)
    monkeypatch.setattr(slurm, "Meeting", Meeting)
    monkeypatch.setattr(slurm, "help_out", lambda *all: said.append(("helps", *all)))
    monkeypatch.setattr(slurm, "bring_to_end", lambda paths, limit_s, options: said.append((paths, options)))
    monkeypatch.setenv("SLURM_JOB_ID", "70003")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    slurm.work(["run"], None, {"retries": 1})
    endpoint = f"node7:{port}"
    if rank:
        assert said == [("helps", 2, endpoint)]
    else:
        options = {"retries": 1, "nodes": nodes_arguments(2, endpoint)}
        assert said == [("meets", endpoint, True), (["run"], options), "finished"]


def test_the_exit_code_says_how_the_run_ended(make_runs, requeued):
    good, bad = make_runs("quick", "raise")
    slurm.work([good.path], None, {})
    with pytest.raises(SystemExit) as failed:
        slurm.work([bad.path], None, {})
    assert failed.value.code == 3 and requeued == []


def test_the_runs_of_a_job_go_on_after_one_that_fails_and_after_one_that_gets_nowhere(
    make_runs, monkeypatch, requeued, told_to_stop
):
    first, *_ = runs = make_runs("sleep", "quick", "quick")
    paths = [run.path for run in runs]
    say(monkeypatch, "RUNNING")
    with pytest.raises(SystemExit):
        slurm.work(paths, 20.0, {})
    assert [run.status()["state"] for run in runs] == ["failed", "pending", "pending"] and requeued == ["6"]
    monkeypatch.setattr(slurm, "PlainDisplay", fake_worker.PlainDisplay)
    with pytest.raises(SystemExit) as failed:
        slurm.work(paths, 20.0, {})
    assert failed.value.code == 3 and len(requeued) == 1
    assert [run.status()["state"] for run in runs] == ["failed", "finished", "finished"]
    assert first.status()["attempt"] == 1
