"""hqsweep.run: a sweep from Python, and what it refuses before anything starts."""

import threading
from pathlib import Path

import pytest

import hqsweep as hq
from hqsweep.errors import UserError
from hqsweep.sweep.engine import launch
from hqsweep.sweep.grid.overrides import quoted
from hqsweep.sweep.grid.run_words import read

TINY = [
    "data=markov", "data.markov.length=4096", "model.dim=32", "model.layers=1", "model.heads=2", "train.steps=4",
    "train.batch=2", "train.context=32", "train.eval_batches=1", "train.device=cpu", "stats.every=0", "track=none",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_sweep_runs_once_and_is_read(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = folder / "its 'own' runs"
    sweep = hq.run("convergence", [*TINY, "recipe=bf16,mxfp8"], out=where)
    said = capfd.readouterr()
    assert "baseline: bf16" in said.err and "2 of 2 runs finished" in said.err and "barely trained" in said.err
    assert not said.out and [run.path.parent for run in sweep] == 2 * [where / "convergence"]
    assert list(sweep.runs["state"]) == ["finished"] * 2 and sweep.runs["val_loss"].notna().all()
    seconds = [(run.path / "status.json").stat().st_mtime_ns for run in sweep]
    again = hq.run("convergence", [*TINY, "recipe=bf16,mxfp8"], out=where, quiet=True)
    assert [(run.path / "status.json").stat().st_mtime_ns for run in again] == seconds
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("conf", "overrides", "says"),
    [
        ("convergenc", [], "did you mean 'convergence'"),
        ("convergence", ["train.stesp=3"], "did you mean 'train.steps'"),
        ("convergence", ["conf=fork"], "a sweep has one conf"),
        ("convergence", "train.steps=3", "overrides: got 'train.steps=3'; give a list"),
        ("fork", ["fork.until=settled"], "fork.max_steps: missing; fork.until=settled adds trunks"),
        ("fork", ["fork.until=settled", "fork.max_steps=479"], "fork.max_steps: 479 steps for the whole study, but"),
        ("convergence", [3], "overrides: got [3]; give a list"),
        ("convergence", [*TINY, "recipe._target_=os.getcwd"], "which no_import=True refuses"),
        ("convergence", [*TINY[2:], "data=markov", "data.markov.length=40"], "train.context"),
    ],
)
def test_what_the_command_refuses_is_refused(folder: Path, conf: str, overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        hq.run(conf, overrides, no_import=True)
    assert says in str(refused.value) and not (folder / "runs").exists()


def test_a_time_without_a_unit_is_refused() -> None:
    with pytest.raises(UserError, match=r"^until: got '20'; it takes a time"):
        hq.run("convergence", TINY, until="20")


def test_a_folder_of_configs_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="config_dir: nowhere is no folder"):
        hq.run("convergence", config_dir="nowhere")


@pytest.mark.parametrize("name", ["plain", "its 'own'", "a\\b", "end\\", "x\\'y", "a=b,c [d] {e}", "#1 % é"])
def test_any_folder_name_can_be_given(name: str) -> None:
    grid = read(["conf=convergence", f"runs_dir={quoted(name)}"]).grid
    assert [point.config["runs_dir"] for point in grid.points] == [name]


def test_another_thread_is_told_why() -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            hq.run("convergence", TINY)
        except UserError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said and "gives to the main thread" in said[0]


def test_an_interrupt_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(code: int):
        def start(plan: launch.SweepPlan, display: object, *, force: bool, until: object) -> list:
            raise SystemExit(code)

        return start

    monkeypatch.setattr(launch, "start", stop(130))
    with pytest.raises(KeyboardInterrupt):
        hq.run("convergence", TINY, quiet=True)
    monkeypatch.setattr(launch, "start", stop(143))
    with pytest.raises(SystemExit):
        hq.run("convergence", TINY, quiet=True)
