"""`hqsweep run conf=command`, from the words to the gate: runs, a failure that is repeated, and a study that grows."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app

pytestmark = pytest.mark.usefixtures("forked_workers")

SCRIPT = """
import json, os, random, sys
recipe, seed = sys.argv[1], int(sys.argv[2])
if os.path.exists("broken") and recipe == "muon":
    sys.exit("no GPU today")
level = random.Random(seed).gauss(2, 0.1)
for step in (1, 2, 3):
    noise = random.Random(f"{recipe}{seed}{step}").gauss(0, 1e-4)
    print(json.dumps({"step": step, "val_loss": level + noise - 0.1 * (recipe == "muon")}))
"""
WORDS = ["conf=command", "sweep=own", "command=python train.py {recipe} {seed}", "baseline=adamw"]


def hqsweep(*words: str):
    return CliRunner().invoke(app, [*words])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_grid_with_a_failure_that_is_repeated(folder):
    grid = ["run", *WORDS, "recipe=adamw,muon", "seed=0,1"]
    (folder / "broken").touch()
    failed = hqsweep(*grid, "--json")
    states = {run["run"].partition("-")[0]: run for run in json.loads(failed.stdout)}
    assert failed.exit_code == 3 and states["adamw"]["state"] == "finished"
    assert states["muon"]["reason"] == "command: it ended with exit code 1; it said: no GPU today"
    (folder / "broken").unlink()
    assert hqsweep(*grid).exit_code == 0
    said = hqsweep("compare", "own", "--out", "r")
    assert said.exit_code == 0 and "muon: better than 'adamw'" in said.output and (folder / "r/report.html").exists()
    assert hqsweep("baseline", "update", "own", "--baseline", "b.json").exit_code == 0
    assert hqsweep("gate", "own", "--baseline", "b.json").exit_code == 0
    assert hqsweep("compare", "own", "--check").exit_code == 2
    assert hqsweep("compare", "own", "--metric", "x").exit_code == 2
    assert hqsweep("verify", "own").exit_code == 0
    shown = hqsweep("show", "own")
    assert "4 finished" in shown.output


def test_a_study_grows_until_it_is_decided():
    said = hqsweep("run", *WORDS, "recipe=adamw,muon", "seeds.until=decided", "seeds.max=4")
    assert said.exit_code == 0 and "every arm has a verdict" in said.output
    assert "muon: better than 'adamw' by" in said.output
