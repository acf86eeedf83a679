"""Longer runs from finished ones: which step they go on from, what is refused, and that they end as if from step 1."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.jobs import TABLES
from hqsweep.errors import UserError
from hqsweep.sweep.engine import launch
from hqsweep.sweep.engine.more_steps import longer_words, starts
from hqsweep.sweep.store.names import run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.train.build import learning_rate
from hqsweep.train.checkpoint import read_state
from hqsweep.train.record import Record, mark_of, write_record

pytestmark = pytest.mark.slow

TINY = [
    "conf=convergence", "data=markov", "data.markov.length=8192", "model.dim=32", "model.layers=1", "model.heads=2",
    "train.batch=2", "train.context=32", "train.eval_batches=1", "train.eval_every=10", "train.checkpoint_every=10",
    "train.device=cpu", "stats.every=10", "track=none",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finished(words: list[str], *steps: int) -> tuple[launch.SweepPlan, list[RunDir]]:
    """A plan, and its runs as if they had finished with checkpoints of these steps."""
    plan = launch.plan([*TINY, *words])
    runs = launch.folders(plan)
    for run in runs:
        run.checkpoint.mkdir()
        for step in steps:
            path = run.checkpoint / f"step_{step}.pt"
            path.write_bytes(b"state")
            record = {**mark_of(b"state"), "run": run_id(run.config()), "file": path.name}
            write_record(path, Record(**{key: value for key, value in record.items() if key != "rows"}))
        run.write_status(state="finished")
    return plan, runs


def begun(words: list[str], *steps: int, more: int = 40) -> list[int]:
    """The steps from which a longer sweep goes on."""
    plan, runs = finished(words, *steps)
    after = launch.plan(longer_words([*TINY, *words], plan.configs, more))
    return [start.step for start in starts(runs, plan.configs, after.configs)]


@pytest.mark.parametrize(
    ("words", "there", "step"),
    [
        (["train.steps=40", "train.decay=0"], (30, 40), 40),
        (["train.steps=40", "train.decay=0.2"], (30, 40), 30),
        (["train.steps=40", "train.decay=0.4"], (20, 30, 40), 20),
        (["train.steps=45", "train.decay=0"], (40, 45), 40),  # the row of step 45 is not one of a longer run
        (["train.steps=40", "train.decay=0", "recipe.schedule=[{at: 25, linear: mxfp8}]"], (30, 40), 40),
        (["train.steps=40", "train.decay=0", "recipe.schedule=[{at: 0.5, linear: mxfp8}]"], (10, 20, 40), 20),
        (["train.steps=40", "train.decay=0", "stats.capture_at=25"], (20, 30, 40), 20),
    ],
)
def test_it_goes_on_from_the_last_checkpoint_that_a_longer_run_would_have(
    words: list[str], there: tuple[int, ...], step: int
) -> None:
    assert begun(words, *there) == [step]


@pytest.mark.parametrize(("steps", "warmup", "more"), [(40, 0.05, 40), (200, 0.05, 130), (70, 0.3, 11), (160, 0.1, 7)])
def test_the_rise_of_the_learning_rate_keeps_its_steps(steps: int, warmup: float, more: int) -> None:
    words = [*TINY, f"train.steps={steps}", f"train.warmup={warmup}", "train.decay=0"]
    before = launch.plan(words)
    after = launch.plan(longer_words(words, before.configs, more))
    assert (after.first.train.steps, after.first.sweep) == (steps + more, f"convergence-{steps + more}")
    rates = [[learning_rate(each.first.train, step) for step in range(1, steps + 1)] for each in (before, after)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    ("words", "there", "says"),
    [
        (["train.steps=40"], (30, 40), "up to step 25 of 40, where its learning rate begins to fall"),
        (
            ["train.steps=40"],
            (30, 40),
            "its checkpoints are of step 30 and 40; train it from its start by train.steps=80",
        ),
        (["train.steps=40", "train.decay=0"], (), "it has no checkpoint"),
        (["train.steps=40,50", "train.decay=0"], (40,), "train.steps or train.warmup is swept"),
        (["fork.at=10"], (), "forks start from trunks"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_with_the_reason(words: list[str], there: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        begun(words, *there)


def test_a_damaged_checkpoint_and_one_of_another_run_are_not_gone_on_from() -> None:
    words = ["train.steps=40", "train.decay=0", "seed=0,1"]
    plan, runs = finished(words, 20, 30, 40)
    after = launch.plan(longer_words([*TINY, *words], plan.configs, 40))
    (runs[0].checkpoint / "step_40.pt").write_bytes(b"other")
    for suffix in ("pt", "json"):
        (runs[1].checkpoint / f"step_40.{suffix}").replace(runs[0].checkpoint / f"step_30.{suffix}")
    assert [start.step for start in starts(runs, plan.configs, after.configs)] == [20, 30]
    runs[1].write_status(state="interrupted")
    with pytest.raises(UserError, match=r"has not finished \(interrupted\); the same command without --more-steps"):
        starts(runs, plan.configs, after.configs)


def test_a_job_without_steps_is_refused() -> None:
    plan = launch.plan(["conf=parity"])
    assert not isinstance(plan.first, ConvergenceConfig)
    with pytest.raises(UserError, match="a parity job trains nothing that has steps"):
        longer_words(["conf=parity"], plan.configs, 10)


def hqsweep(*words: str) -> Result:
    return CliRunner().invoke(app, ["run", *TINY, "recipe=nvfp4", "train.decay=0", *words])


@pytest.mark.usefixtures("forked_workers")
def test_rows_and_state_are_those_of_a_run_from_step_1(folder: Path) -> None:
    short = ("sweep=short", "train.steps=10", "train.warmup=0.1")
    assert hqsweep(*short).exit_code == 0
    dry = hqsweep(*short, "--more-steps", "10", "--dry-run")
    assert dry.exit_code == 0 and "1 run from step 10 of 'short' on" in dry.stderr
    assert not (folder / "runs/short-20").exists()
    assert hqsweep(*short, "--more-steps", "10").exit_code == 0
    assert hqsweep("sweep=whole", "train.steps=20", "train.warmup=0.05").exit_code == 0
    (long,), (whole,) = (sorted((folder / "runs" / sweep).glob("nvfp4-*")) for sweep in ("short-20", "whole"))
    assert long.name == whole.name and RunDir(long).manifest()["continues"].endswith("from step 10")
    assert "repairs" not in RunDir(long).manifest() and RunDir(long).status()["attempt"] == 1
    for table in TABLES:
        assert RunDir(long).rows(table) == RunDir(whole).rows(table)
    leaves = [tree_leaves(read_state(each / "checkpoint/step_20.pt", torch.device("cpu"))) for each in (long, whole)]
    assert len(leaves[0]) > 20
    for ours, theirs in zip(*leaves, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
