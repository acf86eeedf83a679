"""`hqsweep ladder` and hq.ladder: the same answer, one sentence for wrong input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hqsweep as hq
from hqsweep.cli.main import app
from hqsweep.errors import UserError
from hqsweep.report.compare import ladder as ladders
from hqsweep.report.compare.compare import compare
from tests.report.conftest import fork_study, write_sweep

SIZES = {"small": 1e6, "middle": 3e6, "large": 9e6}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def sized(runs):
        comparison = compare(runs)
        comparison.frames.runs["manifest.params"] = SIZES[runs[0].sweep_path.name]
        return comparison

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladders, "compare", sized)
    for name, size in SIZES.items():
        write_sweep(tmp_path / "runs" / name, fork_study({"nvfp4": 0.03 * size**-0.05}, points=[40]))
    return tmp_path


def ladder(*words: str) -> Result:
    return CliRunner().invoke(app, ["ladder", *words])


def test_the_command_and_python_give_one_answer(folder):
    done = ladder(*SIZES, "--at", "30M", "--json")
    page = json.loads(done.stdout)
    assert done.exit_code == 0 and page["params"] == 3e7 and page["report"] == "reports/ladder/ladder.md"
    assert (folder / "reports/ladder/ladder.svg").is_file()
    found = hq.ladder(*SIZES, at=3e7)
    assert found.predictions.loc[0, "gap_pct"] == page["arms"][0]["gap_pct"]
    assert list(found.measured["params"]) == [1e6, 3e6, 9e6] and len(found.figure.data) == 4
    assert "nvfp4: " in repr(found) and len(found.curves) and found.warnings == tuple(page["warnings"])


def test_the_tables_are_shown_to_people():
    shown = " ".join(ladder(*SIZES, "--at", "30M").stdout.split())
    assert "predicted at 30M parameters" in shown and "nvfp4: " in shown and "measured gaps" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["small"], "1 sizes in sweeps of forks"),
        ([*SIZES, "--at", "big"], "at: got 'big'; it takes a number above 0"),
        ([*SIZES, "--design", "both"], "design: got 'both'; it takes fork or whole"),
        ([*SIZES, "--margin", "x"], "margin: got 'x'"),
        (["nowhere"], "nowhere"),
    ],
)
def test_wrong_input_gets_one_sentence_and_code_2(words, said):
    done = ladder(*words)
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_python_refuses_nothing_at_all():
    with pytest.raises(UserError, match="no sweep is given"):
        hq.ladder()
