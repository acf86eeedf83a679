"""docs/ci: the workflow is one that GitHub can read, and its commands are those that exist."""

import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.sweep.compose import expand

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


def test_its_sweep_has_a_null_arm_three_seeds_and_data_that_is_the_same_everywhere() -> None:
    points = expand("ci").points
    assert {(p.arm, p.config["seed"]) for p in points} == {
        (arm, seed) for arm in ("bf16", "mxfp8", "nvfp4", "null") for seed in range(3)
    }
    assert {p.config["data"]["source"] for p in points} == {"markov"}
    assert {(p.config["engine"]["workers"], p.config["engine"]["threads"]) for p in points} == {(2, 1)}
