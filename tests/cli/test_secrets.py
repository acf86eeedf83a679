"""Secrets of the environment reach no file of a run, of its mirrors or of a report, and no line that is printed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hqsweep.cli.main import app

TINY = [
    "conf=convergence", "data=markov", "data.markov.length=4096", "model.dim=32", "model.layers=1", "model.heads=2",
    "train.steps=4", "train.batch=2", "train.context=32", "train.eval_batches=1", "stats.every=2",
]  # fmt: skip
NAMES = ("MY_API_KEY", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "HF_TOKEN")
SECRETS = {name: f"planted{index}" * 5 for index, name in enumerate(NAMES)}  # 40 characters, as W&B's keys have


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_no_secret_is_in_any_file_or_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mirrors = [kind for kind in ("wandb", "tensorboard") if importlib.util.find_spec(kind)]
    monkeypatch.chdir(tmp_path)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    subprocess.run(["git", "init", "-q"], check=True)
    url = f"https://user:{SECRETS['GITHUB_TOKEN']}@example.com/x.git"
    subprocess.run(["git", "remote", "add", "origin", url], check=True)
    first, last = (mirrors or ["none"])[0], (mirrors or ["none"])[-1]
    inside = [
        CliRunner().invoke(
            app, ["run", *TINY, "recipe=bf16,mxfp8", f"track={first}", "track.mode=offline", "sweep=mine"]
        ),
        CliRunner().invoke(app, ["run", *TINY, f"track={last}", "train.lr=1e30", "sweep=diverges"]),
        CliRunner().invoke(app, ["run", *TINY, "train.lr=${oc.env:MY_API_KEY}"]),
    ]
    assert [done.exit_code for done in inside] == [0, 3, 2]
    command = [sys.executable, "-m", "hqsweep", "compare", "mine", "--track"]  # W&B ends with its process
    compared = subprocess.run(command, capture_output=True, check=False)
    assert list(tmp_path.glob("reports/mine/report.html")), compared.stderr
    texts = {"compare": compared.stdout + compared.stderr}
    texts |= {f"command {index}": done.output.encode() for index, done in enumerate(inside)}
    files = [path for path in tmp_path.rglob("*") if path.is_file() and ".git" not in path.parts]
    texts |= {str(path): path.read_bytes() for path in files}
    assert len(files) > 30 and all(any(kind in path.parts for path in files) for kind in mirrors)
    assert not [(where, name) for where, text in texts.items() for name, s in SECRETS.items() if s.encode() in text]
