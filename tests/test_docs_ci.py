"""docs/ci: GitHub can read the workflow, its commands are those that exist, and its sweep finds a change of format."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.sweep.grid.compose import expand

FOLDER = Path(__file__).parents[1] / "docs/ci"
WORKFLOW = yaml.safe_load((FOLDER / "github-actions.yml").read_text())
STEPS = WORKFLOW["jobs"]["gate"]["steps"]
COMMANDS = [step["run"].split("   #")[0] for step in STEPS if step.get("run", "").startswith("hqsweep ")]
COMMANDS += [
    line.split(" #")[0].strip()
    for line in (FOLDER / "README.md").read_text().splitlines()
    if line[:12] == "    hqsweep "
]


def test_the_workflow_runs_the_sweep_and_then_the_gate() -> None:
    assert WORKFLOW[True] == ["pull_request"]  # YAML 1.1 reads the key `on` as true
    assert [shlex.split(command)[1] for command in COMMANDS[:3]] == ["run", "gate", "compare"]
    assert all(("uses" in step) != ("run" in step) for step in STEPS)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_exist(command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "run":
        assert CliRunner().invoke(app, [*words, "--dry-run"]).exit_code == 0
        return
    path = words[:2] if words[0] == "baseline" else words[:1]
    shown = CliRunner().invoke(app, [*path, "--help"]).output
    assert all(word in shown for word in words if word.startswith("--"))


def test_its_sweep_forks_a_null_arm_from_four_trunks_on_data_that_is_the_same_everywhere() -> None:
    points = expand("ci").points
    assert {(p.arm, p.config["seed"]) for p in points} == {
        (arm, seed) for arm in ("trunk", "bf16", "mxfp8", "nvfp4", "null") for seed in range(4)
    }
    assert {p.config["data"]["source"] for p in points} == {"markov"}
    assert {(p.config["engine"]["workers"], p.config["engine"]["threads"]) for p in points} == {(2, 1)}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_its_sweep_in_small_finds_mxfp8_turned_into_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trunks of 250 steps and forks of 30, whose spread differs from processor to processor; the whole of conf=ci
    finds the change from four trunks of 600."""
    monkeypatch.chdir(tmp_path)
    small = ["recipe=bf16,mxfp8", "null_arm=false", "seed=0,1,2", "train.steps=250", "fork.at=250", "fork.steps=10"]

    def hqsweep(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*words])
        return result.exit_code, result.output

    assert hqsweep("run", "conf=ci", *small, "fork.decay=20")[0] == 0
    assert hqsweep("baseline", "update", "ci", "--baseline", "base.json")[0] == 0
    assert hqsweep("gate", "ci", "--baseline", "base.json")[0] == 0
    for run in Path("runs/ci").glob("mxfp8-*"):
        shutil.rmtree(run)
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mxfp8.yaml").write_text("name: mxfp8\nlinear: mxfp4\n")
    assert hqsweep("run", "conf=ci", *small, "fork.decay=20")[0] == 0
    code, printed = hqsweep("gate", "ci", "--baseline", "base.json", "--json")
    arms = {arm["arm"]: arm for arm in json.loads(printed)["arms"]}
    assert code == 1 and arms["bf16"]["bitwise"]
    assert (arms["mxfp8"]["outcome"], arms["mxfp8"]["verdict"], arms["mxfp8"]["n"]) == ("regression", "worse", 3)
    assert arms["mxfp8"]["gap"] > 0.25 and "rowwise and columnwise mxfp8 -> mxfp4" in arms["mxfp8"]["note"]
