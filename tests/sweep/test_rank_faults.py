"""Faults that ranks find when they run, from the command: one sentence, an exit code, an end within 30 s, and nothing
left behind. And what the command finds before it starts ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.sweep.store.run_dir import RunDir

BASE = [
    "conf=convergence", "track=none", "data=markov", "data.markov.length=20000", "train.batch=4", "train.context=32",
    "train.eval_batches=1", "stats=off", "recipe=bf16",
]  # fmt: skip
GPT = ["model.dim=32", "model.layers=2", "model.heads=2"]
MARK = "HQSWEEP_TEST_MARK"
"""The environment variable by which a test knows the processes of a command."""
ENDED_WITHIN_S = 30.0
"""The seconds that ranks have from the fault to their end."""
LONGEST_S = 300.0
"""The seconds that a command may take until its ranks find the fault, on a machine that does much else."""
OTHER_VERSION = """
import os
import shutil
from pathlib import Path

import hqsweep
from torch import nn

def build(width=32, vocab=16):
    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, width), nn.Linear(width, vocab))

if rank := os.environ.get("RANK"):
    shutil.copyfile("/proc/self/environ", Path(__file__).with_name(f"environ.{rank}"))
if rank == "1":
    hqsweep.__version__ = "0.0"
"""
"""A user's model, with which rank 1 is of another version than the others. Each rank leaves its environment in a file,
as `marked` reads it."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended: its exit code, the result of its run, what it said on stderr, the ranks that were among
    the processes watched, and the seconds from the first traceback in the log of the run until these were gone."""

    exit_code: int
    result: dict[str, Any]
    said: str
    ranks: set[str]
    seconds: float


def has_mark(environ: Path, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0")


def marked(mark: str) -> list[int]:
    """The processes with this mark that are alive."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another's, or one that has ended since
            if has_mark(process / "environ", mark):
                processes.append(int(process.name))
    return processes


def has_failed(folder: Path) -> bool:
    return any("Traceback" in log.read_text() for log in folder.glob("runs/*/*/log.txt"))


def command(folder: Path, *words: str) -> Ended:
    """`hqsweep run` in this folder, watched until none of its processes is left."""
    mark, failed = uuid.uuid4().hex, None
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        started = subprocess.Popen(
            [sys.executable, "-m", "hqsweep", "run", "--json", *BASE, "train.device=cpu", *words],
            cwd=folder, env={**os.environ, MARK: mark}, stdout=out, stderr=err,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + LONGEST_S
        while (alive := marked(mark)) or started.poll() is None:
            if failed is None and has_failed(folder):
                failed = time.monotonic()
            assert time.monotonic() < (deadline if failed is None else failed + ENDED_WITHIN_S), alive
            time.sleep(0.1)
        assert failed is not None, (folder / "stderr").read_text()
        seconds = time.monotonic() - failed
    finally:
        for process in marked(mark):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        started.wait()
    (result,) = json.loads((folder / "stdout").read_text())
    said = (folder / "stderr").read_text()
    ranks = {path.suffix[1:] for path in folder.glob("environ.*") if has_mark(path, mark)}
    return Ended(exit_code=started.returncode, result=result, said=said, ranks=ranks, seconds=seconds)


def assert_refused(ended: Ended, sentence: str) -> None:
    """The run failed, the command says so by this sentence (a pattern) alone, and its processes have ended."""
    reason = ended.result["reason"]
    assert re.fullmatch(sentence, reason), reason  # without a number of a rank before it: from rank 0
    assert (ended.exit_code, ended.result["state"], ended.result["val_loss"]) == (3, "failed", None)
    (line,) = [line for line in ended.said.splitlines() if reason in line]
    assert line.count(reason) == 1 and line.startswith(f"{ended.result['run']}: failed")
    assert "Traceback" not in ended.said
    assert ended.ranks == {"0", "1"}  # so that the ranks are among the processes that have ended
    assert ended.seconds < ENDED_WITHIN_S


@pytest.mark.slow
def test_ranks_of_different_versions_end_with_one_sentence_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OTHER_VERSION)
    words = ["train.steps=4", "model=factory", "model._target_=mine.build", "--config-dir", "."]
    ended = command(tmp_path, *words, "train.parallel.dp_shard=2")
    sentence = r"train\.parallel: the ranks disagree in the version of hqsweep: rank 1 has \w{10}, the others \w{10} "
    assert_refused(ended, sentence + r"\(hashes\); give all nodes the same package, config and data")
    run = RunDir(tmp_path / ended.result["path"])
    assert run.status()["state"] == "failed" and run.rows("metrics") == []


def test_a_torch_without_nccl_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    words = [*BASE, *GPT, "train.device=cuda", "train.parallel.dp_shard=2"]
    refused = CliRunner().invoke(app, ["run", *words])
    assert (refused.exit_code, refused.stdout, list(tmp_path.iterdir())) == (2, "", []), refused.stderr
    (line,) = refused.stderr.splitlines()
    assert line.startswith("hqsweep: train.parallel: this torch is built without NCCL, by which GPUs exchange tensors")
