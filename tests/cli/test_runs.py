"""Keeping house: notes and tags of sweeps and runs, and what rm deletes and leaves."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

WORDS = ["recipe=bf16,mxfp8", "seed=0,1"]
STORE = RunStore(Path("runs"))


def hqsweep(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep_of(sweep: str, *words: str) -> list[RunDir]:
    """The folders of a sweep that has not run."""
    plan = launch.plan(["conf=convergence", *(words or WORDS), "track=none", f"sweep={sweep}"])
    study = plan.study.model_dump(mode="json")
    return STORE.create(sweep=sweep, conf="convergence", overrides=plan.words, runs=plan.points, study=study)


def sweeps(*words: str) -> list[dict]:
    return json.loads(hqsweep("ls", "--json", *words).stdout)


def test_a_note_and_tags_are_shown_by_ls_and_show_and_change_no_sealed_file() -> None:
    run = sweep_of("first")[2]
    before = {path: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    assert hqsweep("note", "first", "lower rate").stdout == "first: lower rate\n"
    assert hqsweep("tag", "first", "+good", "+draft").exit_code == 0
    assert hqsweep("tag", "first", "-draft").stdout == "first: [good] lower rate\n"
    hqsweep("note", run.name, "odd at step 3")
    hqsweep("tag", "mxfp8", "+odd")  # two runs
    table = " ".join(hqsweep("ls").stdout.split())
    assert "good, odd (of 2 runs) lower rate" in table
    shown = json.loads(hqsweep("show", run.name, "--json").stdout)
    assert (shown["note"], shown["tags"]) == ("odd at step 3", ["odd"])
    assert "[odd] odd at step 3" in hqsweep("show", run.name).stdout
    assert before == {path: path.read_bytes() for path in before}
    assert hqsweep("note", "first", "").stdout == "first: [good]\n"
    assert hqsweep("note", run.name).stdout == f"first/{run.name}: [odd] odd at step 3\n"


def test_ls_finds_a_tag_on_a_sweep_and_on_a_run() -> None:
    sweep_of("first"), sweep_of("second")
    hqsweep("tag", "first", "+good")
    hqsweep("tag", "runs/second/" + STORE.runs("second")[0].name, "+odd")
    assert [sweep["sweep"] for sweep in sweeps("--tag", "good")] == ["first"]
    assert [sweep["sweep"] for sweep in sweeps("--tag", "odd")] == ["second"]
    assert STORE.runs("second")[0].name in hqsweep("ls", "--tag", "odd").stdout
    assert [sweep["sweep"] for sweep in sweeps()] == ["first", "second"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tag", "first", "good"], "tag: 'good'; write +NAME to add a tag and -NAME to take it away"),
        (["tag", "first", "+a b"], "tag: '+a b'"),
        (["tag", "first", "--jsno"], "tag: '--jsno'"),
        (["tag", "first", "+" + "x" * 41], "at most 39"),
        (["tag", "first", "-godo"], "tag: 'godo' is no tag of what was named (did you mean 'good'?); it has good"),
        (["tag", "frist", "+good"], "'frist' is no run or sweep in runs and no folder (did you mean 'first'?)"),
        (["note", "first", "x" * 2001], "note: 2001 characters"),
        (["ls", "--tag", "bad"], "--tag: nothing has the tag 'bad'; there are good"),
    ],
)
def test_what_is_refused_changes_nothing(words: list[str], says: str, folder: Path) -> None:
    sweep_of("first", "recipe=bf16")
    hqsweep("tag", "first", "+good")
    before = (folder / "runs/first/notes.json").read_bytes()
    result = hqsweep(*words)
    assert result.exit_code == 2 and says in result.stderr, result.stderr
    assert (folder / "runs/first/notes.json").read_bytes() == before


@pytest.mark.parametrize("text", ["[]", "{", '{"note": 3}', '{"runs": {"a": []}}', '{"tags": "good"}', ""])
def test_damaged_notes_are_named_and_hide_nothing_else(text: str, folder: Path) -> None:
    (run,) = sweep_of("first", "recipe=bf16")
    (folder / "runs/first/notes.json").write_text(text)
    assert "notes.json" in hqsweep("ls").stdout and [sweep["runs"] for sweep in sweeps()] == [1]
    assert hqsweep("show", run.name).exit_code == 0
    result = hqsweep("tag", "first", "+good")
    assert result.exit_code == 3 and "notes.json" in result.stderr and "Traceback" not in result.stderr


def names(sweep: str) -> list[str]:
    """What the sweep's list has."""
    return [run.name for run in STORE.runs(sweep)]


def test_rm_deletes_a_run_its_place_in_the_list_and_its_notes(folder: Path) -> None:
    runs = sweep_of("first")
    hqsweep("tag", "first", "+good")
    hqsweep("note", runs[0].name, "odd")
    assert hqsweep("rm", runs[0].name).exit_code == 2 and runs[0].path.is_dir()  # nobody there who could be asked
    result = hqsweep("rm", runs[0].name, "mxfp8", "--yes")
    assert result.exit_code == 0 and "3 runs of first, which has more" in result.stderr
    assert names("first") == [runs[1].name] and [run.path.is_dir() for run in runs] == [False, True, False, False]
    entry = STORE.facts("first")
    assert entry["arms"] == ["bf16"] and json.loads((folder / "runs/first/notes.json").read_text()) == {
        "note": "", "tags": ["good"], "runs": {},
    }  # fmt: skip
    assert [run.name for run in sweep_of("first")] == [
        run.name for run in runs
    ]  # and the same command makes them again


def test_rm_of_a_whole_sweep_leaves_what_is_not_hqsweeps(folder: Path) -> None:
    sweep_of("first"), sweep_of("second")
    hqsweep("note", "first", "old")
    (folder / "runs/second/mine.txt").touch()
    assert hqsweep("rm", "first", "second", "--yes").exit_code == 0
    assert not (folder / "runs/first").exists() and STORE.sweeps() == []
    assert [path.name for path in (folder / "runs/second").iterdir()] == ["mine.txt"]


def test_rm_unlists_a_run_whose_folder_is_gone_and_follows_no_link(folder: Path) -> None:
    first, second, *_ = sweep_of("first")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/kept").touch()
    shutil.rmtree(first.path)
    shutil.rmtree(second.path)
    second.path.symlink_to(folder / "elsewhere")
    assert hqsweep("rm", "bf16", "--yes").exit_code == 0
    assert not second.path.is_symlink() and (folder / "elsewhere/kept").exists() and len(names("first")) == 2


@pytest.mark.parametrize("named", ["mine", "runs/mine", "all of its runs"])
def test_rm_of_a_link_to_a_sweep_deletes_the_link_alone(named: str, folder: Path) -> None:
    runs = sweep_of("mine")
    shutil.move("runs/mine", "archive")
    Path("runs/mine").symlink_to(folder / "archive")
    before = sorted(path.relative_to("archive") for path in Path("archive").rglob("*"))
    result = hqsweep("rm", *([run.name for run in runs] if named == "all of its runs" else [named]), "--yes")
    assert result.exit_code == 0 and not Path("runs/mine").is_symlink()
    assert sorted(path.relative_to("archive") for path in Path("archive").rglob("*")) == before and before
    assert result.stdout == f"deleted\nruns/mine was a link; {folder / 'archive'} stays\n"
    assert "the link is deleted, what is behind it stays" in result.stderr and "files that are not" not in result.stdout


def test_rm_deletes_no_run_through_a_link_and_all_under_a_linked_runs_dir(folder: Path) -> None:
    (run, *_) = sweep_of("mine")
    shutil.move("runs/mine", "archive")
    Path("runs/mine").symlink_to(folder / "archive")
    result = hqsweep("rm", run.name, "--yes")
    own = folder / "archive" / run.name
    assert result.exit_code == 2 and f"name {run.name} by its own path, {own}" in result.stderr
    assert len(names("mine")) == 4 and own.is_dir()
    Path("runs/mine").unlink()
    shutil.move("archive", "runs/mine")
    shutil.move("runs", "scratch")
    Path("runs").symlink_to(folder / "scratch")  # the usual way to have the runs on another disk
    assert hqsweep("rm", run.name, "--yes").exit_code == 0 and len(names("mine")) == 3
    assert hqsweep("rm", "mine", "--yes").exit_code == 0 and not Path("scratch/mine").exists()


@pytest.mark.parametrize("inner", ["checkpoint", "wandb", "notes", "slurm"])
def test_rm_follows_no_link_below_a_sweep(inner: str, folder: Path) -> None:
    run, *_ = sweep_of("mine")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/kept").touch()
    place = run.path / inner if inner in ("checkpoint", "wandb") else run.sweep_path / inner
    place.symlink_to(folder / "elsewhere")
    assert hqsweep("rm", "mine", "--yes").exit_code == 0
    assert (folder / "elsewhere/kept").exists() and not run.path.exists()


def test_rm_refuses_what_works_waits_or_is_needed(folder: Path) -> None:
    runs = sweep_of("first")
    trunk, fork, *_ = sweep_of("forked", "recipe=bf16", "seed=0", "fork.at=10,20")
    with runs[0].lock():
        assert "is at work; `hqsweep cancel" in hqsweep("rm", "first", "--yes").stderr
    runs[0].write_status(state="running", host="elsewhere")
    assert "is at work; `hqsweep cancel" in hqsweep("rm", runs[0].name, "--yes").stderr
    runs[1].job_path.write_text('{"id": "12_3"}')
    assert "waits for Slurm as job 12_3" in hqsweep("rm", runs[1].name, "--yes").stderr
    assert f"{trunk.name} is the trunk of {fork.name}" in hqsweep("rm", trunk.name, "--yes").stderr
    alone = folder / "alone"
    shutil.copytree(runs[2].path, alone)
    assert "is no sweep's folder" in hqsweep("rm", str(alone), "--yes").stderr
    assert all(run.path.is_dir() for run in (*runs, trunk, fork)) and len(names("first")) == 4
    assert hqsweep("rm", trunk.name, fork.name, names("forked")[2], "--yes").exit_code == 0
    assert not (folder / "runs/forked").exists()


def test_rm_keeps_a_run_whose_checkpoint_other_forks_start_from() -> None:
    (run,) = sweep_of("first", "recipe=bf16")
    study = {"fork": {"at": [10], "trunk": str(run.checkpoint / "step_10.pt")}}
    STORE.create(sweep="forked", conf="c", overrides=[], runs=launch.plan(["conf=convergence"]).points, study=study)
    assert "forks of 'forked' that are not done start from" in hqsweep("rm", "first", "--yes").stderr
    assert run.path.is_dir() and hqsweep("rm", "first", "forked", "--yes").exit_code == 0 and STORE.sweeps() == []
