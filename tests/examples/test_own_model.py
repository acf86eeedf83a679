"""examples/own_model: the commands of its README, for a few steps, from Python's sources to verdicts."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from hqsweep.cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {
    "python": ["--steps", "10"],
    "run": ["recipe=bf16,nvfp4", "train.steps=12", "fork.at=12", "fork.steps=3", "fork.decay=3", "train.log_every=1",
            "train.eval_batches=2", "engine.workers=1", "engine.threads=1"],
}  # fmt: skip
"""By the second word of a command, or the first: what makes it short."""


def commands() -> list[list[str]]:
    """The commands of the README in its order, without their comments."""
    lines = (EXAMPLES / "own_model/README.md").read_text().splitlines()
    commands_of_file = [
        line.strip().partition("  #")[0] for line in lines if line.startswith(("    python ", "    hqsweep "))
    ]
    return [shlex.split(line) for line in commands_of_file]


def done(words: list[str], folder: Path) -> str:
    """The output of a command that has to succeed. Those of hqsweep run in this process."""
    extra = SHORT.get(words[0], SHORT.get(words[1], []))
    changed = {word.partition("=")[0] for word in extra}
    words = [word for word in words if word.partition("=")[0] not in changed or word in SHORT]
    if words[0] == "hqsweep":
        ended = CliRunner().invoke(app, [*words[1:], *extra])
        assert ended.exit_code == 0, f"{' '.join(words)}\n{ended.output}"
        return ended.output
    command = [sys.executable, *words[1:], *extra]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_commands_of_the_readme_lead_from_text_to_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("COLUMNS", "160")):
        monkeypatch.setenv(name, value)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    said = {}
    for words in commands():
        said[" ".join(words[1:3])] = done(words, tmp_path)
    told = " ".join(said["compare own_model"].split())
    assert "Re-warm: val_loss of the checkpoint model is" in told and "mean of 3 trunks" in told
    assert all(f" {arm} " in told for arm in ("null", "nvfp4"))
    assert "trunks begin from" in " ".join(value for key, value in said.items() if key.startswith("run "))
    keys = [set(safe_open(tmp_path / "own" / name / "model.safetensors", "pt").keys()) for name in ("model", "trained")]
    assert keys[0] == keys[1]
    configs = [json.loads((tmp_path / "own" / name / "config.json").read_text()) for name in ("model", "trained")]
    assert configs[0]["hidden_size"] == configs[1]["hidden_size"]
