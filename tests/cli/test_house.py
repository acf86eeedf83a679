"""Keeping house: notes and tags of sweeps and runs, and what rm deletes and leaves."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hqsweep.cli.main import app
from hqsweep.sweep import launch
from hqsweep.sweep.run_dir import RunDir
from hqsweep.sweep.store import RunStore

WORDS = ["recipe=bf16,mxfp8", "seed=0,1"]
STORE = RunStore(Path("runs"))


def hqsweep(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(sweep: str, *words: str) -> list[RunDir]:
    """The folders of a sweep that has not run."""
    plan = launch.plan(["conf=convergence", *(words or WORDS), "track=none", f"sweep={sweep}"])
    study = plan.study.model_dump(mode="json")
    return STORE.create(sweep=sweep, conf="convergence", overrides=plan.words, runs=plan.points, study=study)


def sweeps(*words: str) -> list[dict]:
    return json.loads(hqsweep("ls", "--json", *words).stdout)


def test_a_note_and_tags_are_shown_by_ls_and_show_and_change_no_sealed_file() -> None:
    run = made("first")[2]
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
    made("first"), made("second")
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
    made("first", "recipe=bf16")
    hqsweep("tag", "first", "+good")
    before = (folder / "runs/first/notes.json").read_bytes()
    result = hqsweep(*words)
    assert result.exit_code == 2 and says in result.stderr, result.stderr
    assert (folder / "runs/first/notes.json").read_bytes() == before


@pytest.mark.parametrize("text", ["[]", "{", '{"note": 3}', '{"runs": {"a": []}}', '{"tags": "good"}', ""])
def test_damaged_notes_are_named_and_hide_nothing_else(text: str, folder: Path) -> None:
    (run,) = made("first", "recipe=bf16")
    (folder / "runs/first/notes.json").write_text(text)
    assert "notes.json" in hqsweep("ls").stdout and [sweep["runs"] for sweep in sweeps()] == [1]
    assert hqsweep("show", run.name).exit_code == 0
    result = hqsweep("tag", "first", "+good")
    assert result.exit_code == 2 and "notes.json" in result.stderr and "Traceback" not in result.stderr
