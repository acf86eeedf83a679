"""Random command lines and configs end in an exit code of the list, and wrong ones in one sentence: never a traceback.

HQSWEEP_FUZZ=5000 draws that many cases instead of the usual ones. HQSWEEP_FUZZ_SEED draws others.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from support.fuzz import cli_cases
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.sweep.engine import launch
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("HQSWEEP_FUZZ", 100))
FIRST = int(os.environ.get("HQSWEEP_FUZZ_SEED", 0))


def flags() -> dict[str, list[str]]:
    """Command -> its options."""
    commands = dict(typer.main.get_command(app).commands)
    for group in ("recipe", "baseline"):
        commands |= {f"{group} {name}": command for name, command in commands[group].commands.items()}
    names = {
        name: [o for p in command.params for o in p.opts if o.startswith("-")] for name, command in commands.items()
    }
    return {name: ["--help", *options] for name, options in names.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of which nothing ran, and broken folders beside it; whatever is started comes back at once."""
    monkeypatch.chdir(tmp_path)
    for start in ("run_local", "run_slurm"):
        monkeypatch.setattr(launch, start, lambda runs, **given: None)
    if find_spec("wandb"):
        monkeypatch.setattr("hqsweep.track.open.sync", lambda run, mode: [])
    plan = launch.plan(["conf=convergence", "recipe=bf16,mxfp8", "track=none"])
    RunStore(Path("runs")).create(sweep="convergence", conf="convergence", overrides=[], runs=plan.points)
    for path, data in {
        "runs/torn/sweep.json": b'{"name": "torn", "ru',
        "runs/alien/sweep.json": b"[1, 2]",
        "runs/empty/sweep.json": b"{}",
        "runs/torn/run/config.yaml": b"a: [",
        "runs/torn/run/status.json": b"3",
        "bytes.bin": bytes(range(256)),
        "bytes.safetensors": bytes(range(256)),
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)
    save_file({"layers.0.proj.weight": torch.randn(64, 32), "bias": torch.zeros(3)}, "good.safetensors")
    return tmp_path


def test_no_command_line_ends_in_a_traceback(folder: Path) -> None:
    known, failures = flags(), []
    for seed in range(FIRST, FIRST + CASES):
        case = cli_cases.draw(seed, known)
        for name, text in case.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        if problem := fault(case.words):
            failures.append(f"seed {seed}: {problem}\n  {case!r}")
    if failures:
        pytest.fail(f"{len(failures)} of {CASES}\n" + "\n".join(failures[:20]), pytrace=False)


def fault(words: tuple[str, ...]) -> str | None:
    """What is wrong with how a command ends, or None."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {result.exception}"
    if result.exit_code not in range(5):
        return f"exit code {result.exit_code}"
    if result.exit_code != 2:
        return None
    lines = result.stderr.splitlines()
    good = len(lines) == 1 and lines[0].startswith("hqsweep: ") and "Traceback" not in lines[0]
    return None if good else f"not one sentence: {result.stderr[:300]!r}"
