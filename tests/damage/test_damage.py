"""Whatever happens to the files of a sweep, no number that was not produced is believed: a damage changes nothing that
a command says, or is named; nothing ends in a traceback; and the sweep's own command makes good what was damaged.

HQSWEEP_DAMAGES=2000 inflicts that many instead of the usual ones, and HQSWEEP_DAMAGE_SEED others.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.damage import damages
from support.damage.damages import Damage
from support.sweep.forked_workers import ForkedWorker
from typer.testing import CliRunner

from hqsweep import worker
from hqsweep.cli.main import app
from hqsweep.errors import Damaged
from hqsweep.jobs.isolation import isolated
from hqsweep.sweep.console import PlainDisplay
from hqsweep.sweep.engine import launch, process
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.rows import RowSink

pytestmark = pytest.mark.slow
DAMAGES = int(os.environ.get("HQSWEEP_DAMAGES", len(damages.KINDS) * 3))
"""By default each kind is done once to each sweep of STATES."""
PARTS = -(-DAMAGES // 100)
FIRST = int(os.environ.get("HQSWEEP_DAMAGE_SEED", 0))
TINY = [
    "model.dim=32", "model.layers=1", "model.heads=2", "train.batch=2", "train.context=32", "train.log_every=1",
    "train.eval_batches=1", "train.checkpoint_every=4", "train.device=cpu", "stats.every=6", "data=markov",
    "data.markov.length=20000", "track=none", "engine.workers=2", "engine.threads=1",
]  # fmt: skip
SEALED = (".yaml", ".json", ".jsonl", ".parquet")
SWEEPS = {
    "whole": ["conf=convergence", "recipe=bf16,nvfp4", "seed=0,1", "train.steps=12", "train.eval_every=4"],
    "forks": ["conf=convergence", "recipe=bf16,nvfp4", "seed=0,1,2", "fork.at=4,8", "fork.steps=3", "fork.decay=3"],
}
STATES = {"whole": "finished", "forks": "finished", "cut_short": "unfinished"}
"""Sweep -> whether its runs are finished when it is damaged; those of cut_short were killed between checkpoints."""
NUMBERS = ("final_loss", "final_sd", "gap", "gap_pct", "ci_low", "ci_high", "gap_nats", "n", "pairs", "verdict")
ROWS = ("metrics.jsonl", "stats.jsonl")


FINISHED = "finished"


class Killed(BaseException):
    """Stands for kill -9: nothing in the worker may answer to it."""


class Quiet(PlainDisplay):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._statuses, self._said_s, self._every_s = {}, {}, 1e9

    def say(self, line: str) -> None:
        self.lines.append(line)

    def update(self, run: str, status: Any) -> None:
        self._statuses[run] = status


def words(name: str) -> list[str]:
    """The words of a sweep's command, which is repeated in the folder where its damaged copy is."""
    return [*SWEEPS["whole" if name == "cut_short" else name], f"sweep={name}", *TINY]


@dataclass(frozen=True)
class Origin:
    """Intact sweeps below runs/ of a folder, and what is said of them."""

    root: Path
    rows: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Sweep -> file of rows, below the sweep's folder -> content."""

    def copy(self, name: str, to: Path) -> Path:
        """The sweep in a new working directory; returns its folder there."""
        return Path(shutil.copytree(self.root / "runs" / name, to / "runs" / name, symlinks=True))


def all_rows(sweep: Path) -> dict[str, bytes]:
    files = (path for table in ROWS for path in sweep.glob(f"*/{table}"))
    return {str(path.relative_to(sweep)): path.read_bytes() for path in sorted(files)}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """The sweeps of STATES: trained to their end, and cut_short killed in the midst."""
    root = tmp_path_factory.mktemp("origin")
    source = Origin(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(process, "WorkerProcess", ForkedWorker)
        for name in SWEEPS:
            launch.start(launch.plan(words(name)), Quiet())
            source.rows[name] = all_rows(root / "runs" / name)
        cut_short(launch.plan(words("cut_short")))
        source.rows["cut_short"] = source.rows["whole"]
        yield source


def cut_short(plan: launch.SweepPlan) -> None:
    """Kill each run between two checkpoints, at another row."""
    started: list[RunDir] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run_local", lambda runs, **_: started.extend(runs))
        launch.start(plan, Quiet())
    for index, run in enumerate(started):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed), isolated():
            patch.setattr(RowSink, "metric", killing_at(9 + index % 3))
            worker.main([str(run.path)])
        run.write_status(pid=2**22 + 1)  # which no process has


def killing_at(step: int) -> Callable[..., None]:
    write = RowSink.metric

    def metric(self: RowSink, at: int, values: Any) -> None:
        if at == step:
            raise Killed
        write(self, at, values)

    return metric


def said(*command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command. AssertionError for one that ends otherwise than commands do."""
    result = CliRunner().invoke(app, list(command))
    everything = result.stdout + result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{' '.join(command)}: {type(result.exception).__name__}: {result.exception}")
    assert "Traceback" not in everything and result.exit_code in range(5), f"{' '.join(command)}: {everything[-400:]}"
    if result.exit_code and not result.stdout:
        assert result.stderr.startswith("hqsweep: ") and result.stderr.count("\n") == 1, result.stderr
    return result.exit_code, result.stdout, result.stderr


def numbers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Arm -> what is said of it, without times."""
    return {row["arm"]: {key: row.get(key) for key in NUMBERS} for row in (*document["arms"], *document["baselines"])}


class Oracle:
    """What `compare` says of some runs of an intact sweep, by themselves."""

    def __init__(self, origin: Origin) -> None:
        self.origin, self._known = origin, {}

    def runs(self, name: str) -> frozenset[str]:
        return frozenset(path.name for path in (self.origin.root / "runs" / name).iterdir() if path.is_dir())

    def __call__(self, name: str, runs: frozenset[str]) -> dict[str, dict[str, Any]] | None:
        if (name, runs) not in self._known:
            folders = [str(self.origin.root / "runs" / name / run) for run in sorted(runs)]
            code, out, _ = said("compare", *folders, "--partial", "--json", "--baseline", "bf16")
            self._known[name, runs] = None if code == 2 else numbers(json.loads(out))
        return self._known[name, runs]


def fault_of(name: str, damage: Damage, sweep: Path, oracle: Oracle) -> str | None:
    """What is wrong with what commands say of a damaged sweep of finished runs; None where all is well."""
    for command in (["ls"], ["status", name], ["show", damage.path.split("/")[0]]):
        said(*command, "--json")
    verified, *_ = said("verify", name, "--json")
    code, out, refusal = said("compare", name, "--json", "--baseline", "bf16")
    if not out:
        return None if (code, verified) == (3, 3) else f"exit codes {code} and {verified}: {refusal}"
    document = json.loads(out)
    left = {entry["run"].split("/")[-1] for entry in document["left_out"]}
    if left and (code, verified) != (3, 3):
        return f"exit codes {code} and {verified} with {left} left out"
    sealed = damage.path.endswith(SEALED) and "/checkpoint/" not in damage.path
    if sealed and verified == 0 and changed(sweep, damage, oracle.origin):
        return "verified"
    expected = oracle(name, oracle.runs(name) - left)
    return None if numbers(document) == expected else f"{numbers(document)} instead of {expected}"


def changed(sweep: Path, damage: Damage, origin: Origin) -> bool:
    """Whether the damage made another file of it: to edit a line may give the same one."""
    there, before = sweep / damage.path, origin.root / "runs" / sweep.name / damage.path
    if there.is_symlink() or not there.is_file():
        return True
    if there.suffix == ".json":
        with suppress(ValueError):
            return json.loads(there.read_bytes()) != json.loads(before.read_bytes())
    return there.read_bytes() != before.read_bytes()


def content(path: Path) -> bytes | None:
    """None where there is no file."""
    return path.read_bytes() if path.is_file() else None


def started(plan: launch.SweepPlan, home: Path) -> list[RunDir]:
    """What the sweep's command does in a folder before it hands the runs to the engine."""
    handed: list[RunDir] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(launch, "run_local", lambda runs, **_: handed.extend(runs))
        launch.start(plan, Quiet())
    return [RunDir(home / run.path) for run in handed]


def end_all(runs: list[RunDir]) -> None:
    """Bring runs of any sweeps to their end, two at a time."""
    run_local(runs, display=Quiet(), limits=Limits(workers=2, threads=1))


def not_repaired(damaged: dict[Damage, Path], oracle: Oracle, plans: dict[str, launch.SweepPlan]) -> list[str]:
    """Faults of sweeps whose own command is given again, twice where a run says why it could not finish at once."""
    origin, faults, left = oracle.origin, [], dict(damaged)
    for _ in range(2):
        runs = {}
        for damage, sweep in left.items():
            try:
                runs[damage] = started(plans[sweep.name], sweep.parents[1])
            except (Exception, SystemExit) as error:
                faults.append(f"{damage}: its command ends in {type(error).__name__}: {error}")
        end_all([run for each in runs.values() for run in each])
        ends = {damage: {run.path: end_of(run) for run in each} for damage, each in runs.items()}
        left = {damage: left[damage] for damage, each in ends.items() if set(each.values()) != {FINISHED}}
        for damage, each in ends.items():
            sweep = damaged[damage]
            finished = {path for path, end in each.items() if end == FINISHED}
            files = [file for file in origin.rows[sweep.name] if (sweep / file).parent in finished]
            wrong = [file for file in files if content(sweep / file) != origin.rows[sweep.name][file]]
            silent = [path.name for path, end in each.items() if not end]
            if wrong or silent:
                faults.append(f"{damage}: other rows than without it: {wrong}; not finished without a reason: {silent}")
    faults += [f"{damage}: not finished by two repetitions: {set(ends[damage].values())}" for damage in left]
    return faults + [
        f"{damage}: {fault}" for damage, sweep in damaged.items() if (fault := doubt(damage, sweep, oracle))
    ]


def doubt(damage: Damage, sweep: Path, oracle: Oracle) -> str | None:
    """What commands still have against a sweep that was repaired; they go on naming a run that is none of its own."""
    foreign = damage.kind == "double run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sweep.parents[1])
        verified, report, refusal = said("verify", sweep.name, "--json")
        faults = [fault["file"] for fault in json.loads(report)["faults"]] if report else [refusal]
        if not foreign and any("/checkpoint/" not in file for file in faults):  # which a finished run does without
            return f"repaired, but not verified, with exit code {verified}: {faults}"
        if sweep.name == "cut_short":
            return None
        _, out, refusal = said("compare", sweep.name, "--json", "--baseline", "bf16")
    if not out or numbers(json.loads(out)) != oracle(sweep.name, oracle.runs(sweep.name)):
        return f"repaired, but with other numbers: {refusal}"
    return None


def end_of(run: RunDir) -> str | None:
    """FINISHED, or why a run is not."""
    try:
        status = run.status()
    except Damaged as error:
        return str(error)
    return FINISHED if status["state"] == FINISHED else status["reason"]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("forked_workers")
def test_no_damage_is_believed(part: int, origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hqsweep.report.pages.folder.write", lambda comparison, out: out / "report.html"
    )  # has own tests
    monkeypatch.setattr("hqsweep.study.noise.record", lambda *_: None)
    oracle, faults, damaged = Oracle(origin), [], {}
    plans = {name: launch.plan(words(name)) for name in STATES}
    for seed in range(FIRST + part, FIRST + DAMAGES, PARTS):
        name = sorted(STATES)[(seed + seed // len(damages.KINDS)) % len(STATES)]
        home = tmp_path / str(seed)
        sweep = origin.copy(name, home)
        damage = damages.draw(seed, sweep)
        damages.inflict(damage, sweep)
        damaged[damage] = sweep
        monkeypatch.chdir(home)
        try:
            if STATES[name] == "finished" and (fault := fault_of(name, damage, sweep, oracle)):
                faults.append(f"{damage}: {fault}")
            if STATES[name] == "unfinished":
                for command in (["ls"], ["status", name], ["compare", name, "--partial"], ["verify", name]):
                    said(*command, "--json")
        except (Exception, SystemExit) as error:
            faults.append(f"{damage}: {type(error).__name__}: {error}")
    faults += not_repaired(damaged, oracle, plans)
    if faults:
        pytest.fail(f"{len(faults)} of {DAMAGES // PARTS}\n" + "\n".join(faults[:20]), pytrace=False)
