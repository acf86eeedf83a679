"""A run whose rows or checkpoints were damaged ends with the rows of one that was left in peace, and says so."""

import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hqsweep import worker
from hqsweep.config.job import parse
from hqsweep.sweep.engine.launch import result
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train.loop import Trainer
from hqsweep.train.record import checkpoints

pytestmark = pytest.mark.slow

CONFIG = {
    "job": "convergence", "sweep": "cut", "recipe": {"name": "mxfp8", "linear": "mxfp8"},
    "model": {"dim": 32, "layers": 1, "heads": 2},
    "data": {"source": "markov", "markov": {"length": 20_000}},
    "train": {"steps": 8, "batch": 2, "context": 32, "log_every": 1, "eval_every": 3, "eval_batches": 1,
              "checkpoint_every": 2, "device": "cpu"},
    "stats": {"every": 2, "capture_at": 3},
}  # fmt: skip
STOP = 7
"""The first step that an interrupted run has not: it has checkpoints of 4 and 6."""
TABLES = ("metrics", "stats")


def make_run(root: Path, **changes) -> RunDir:
    config = parse(CONFIG | {"runs_dir": str(root)} | changes).model_dump(mode="json")
    point = SimpleNamespace(config=config, arm="mxfp8", overrides=[])
    return RunStore(root).create(sweep="cut", conf="cut", overrides=[], runs=[point])[0]


def interrupt(run: RunDir) -> None:
    """Interrupt a run as kill -9 would, after the rows of the step before STOP."""
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer._advance

        def advance(self):
            if self.step == STOP - 1:
                raise KeyboardInterrupt
            return real(self)

        patch.setattr(Trainer, "_advance", advance)
        with pytest.raises(KeyboardInterrupt):
            worker.main([str(run.path)])


def rows(run: RunDir) -> list[bytes]:
    return [run.jsonl(table).read_bytes() for table in TABLES]


@pytest.fixture(autouse=True, scope="module")
def handlers() -> Iterator[None]:
    """pytest's own signal handlers, back again at the end."""
    numbers = (*worker.STOP_SIGNALS, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> SimpleNamespace:
    """whole: rows of the run left in peace; captured: what it captured; cut and other: interrupted ones, of two
    seeds."""
    root = tmp_path_factory.mktemp("resume")
    whole, cut, other = make_run(root / "whole"), make_run(root / "cut"), make_run(root / "other", seed=1)
    assert worker.main([str(whole.path)]) == 0
    interrupt(cut)
    interrupt(other)
    assert list(checkpoints(cut.checkpoint)) == [4, 6]
    captured = (whole.path / "captured" / "step_3.safetensors").read_bytes()
    return SimpleNamespace(whole=rows(whole), captured=captured, cut=cut, other=other)


@pytest.fixture
def run(origin, tmp_path) -> RunDir:
    """An interrupted run of its own for the test."""
    return RunDir(shutil.copytree(origin.cut.path, tmp_path / "cut" / origin.cut.name))


def lines(count: int) -> Callable[[bytes], bytes]:
    return lambda data: b"".join(data.splitlines(keepends=True)[:count])


def flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def edit(data: bytes) -> bytes:
    head, _, rest = data.partition(b"\n")
    return json.dumps(json.loads(head) | {"step": 1, "layer": "x"}).encode() + b"\n" + rest


def until_step_5(data: bytes) -> bytes:
    return b"".join(line for line in data.splitlines(keepends=True) if json.loads(line)["step"] <= 5)


START, FOUR = "the run began again from the start", "the run went on from step_4.pt"
EARLY = r"the first \d+ rows of {}\.jsonl are not those that were written before it"
FEW = r"{}\.jsonl has {} rows?, \d+ were written before it"
SIX = r"checkpoint/step_6\.pt: "
ROWS = {
    "cut to the first": (lines(1), FEW.format("{}", 1), START),
    "cut to step 5": (until_step_5, FEW.format("{}", r"\d+"), FOUR),
    "emptied": (lambda data: b"", FEW.format("{}", 0), START),
    "deleted": (None, FEW.format("{}", 0), START),
    "one line doubled": (lambda data: lines(1)(data) + data, EARLY, START),
    "one line deleted": (lambda data: data.partition(b"\n")[2], FEW.format("{}", r"\d+"), START),
    "edited": (edit, EARLY, START),
    "garbage": (lambda data: b"\0\xff[" * 5000 + b"\n" * 500, EARLY, START),
    "all of it doubled": (lambda data: data + data, None, None),
    "a torn tail": (lambda data: data + b'{"step": 7, "me', None, None),
    "foreign rows after it": (lambda data: data + b'{"a": 1}\n[]\n', None, None),
}


@pytest.mark.parametrize(
    ("table", "name"),
    [*(("metrics", name) for name in ROWS), *(("stats", name) for name in ("cut to step 5", "deleted", "edited"))],
)
def test_damaged_rows_are_written_again(run, origin, table, name):
    (damage, fault, way), path = ROWS[name], run.jsonl(table)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    assert_made_good(run, origin, fault and SIX + fault.format(table), way)


def test_rows_of_another_run_are_not_taken(run, origin):
    for table in TABLES:
        shutil.copy(origin.other.jsonl(table), run.jsonl(table))
    assert_made_good(run, origin, SIX + EARLY.format("metrics"), START)


def test_a_table_that_the_run_has_not_is_emptied(run, origin):
    run.jsonl("parity").write_text('{"check": "kernel"}\n')
    run.parquet("parity").write_bytes(b"PAR1")
    assert_made_good(run, origin, None, None)
    assert not run.jsonl("parity").exists() and not run.parquet("parity").exists()


FILES = {
    "flipped": (flip, "its bytes are not those that were written"),
    "emptied": (lambda data: b"", r"it is empty, and \d+ were written"),
    "cut": (lambda data: data[:-100], r"it has \d+ bytes, and \d+ were written"),
    "longer": (lambda data: data + b"x", r"it has \d+ bytes, and \d+ were written"),
}


@pytest.mark.parametrize(("damage", "fault"), FILES.values(), ids=FILES)
def test_a_damaged_checkpoint_is_not_taken(run, origin, damage, fault):
    path = run.checkpoint / "step_6.pt"
    path.write_bytes(damage(path.read_bytes()))
    assert_made_good(run, origin, SIX + fault, FOUR)


def test_without_a_sound_checkpoint_the_run_begins_again(run, origin):
    for path in checkpoints(run.checkpoint).values():
        path.write_bytes(flip(path.read_bytes()))
    repairs = assert_made_good(run, origin, SIX + "its bytes are not those that were written", START)
    assert [line.split(":")[0] for line in repairs] == ["checkpoint/step_6.pt", "checkpoint/step_4.pt"]


RECORDS = {
    "deleted": (None, r"its record step_6\.json is not there"),
    "garbage": (lambda data: b"\0\0", r"its record step_6\.json is not one"),
    "a list": (lambda data: b"[]", r"its record step_6\.json is not one"),
    "half": (lambda data: data[: len(data) // 2], r"its record step_6\.json is not one"),
    "other types": (lambda data: data.replace(b'"bytes": ', b'"bytes": -1.5e'), r"its record step_6\.json is not one"),
    "other rows": (
        lambda data: data.replace(b'"rows": 1', b'"rows": 2'),
        r".*\.jsonl has \d+ rows, 2\d+ were written",
    ),
    "another hash": (lambda data: data.replace(b'"sha256": "', b'"sha256": "0'), "its bytes are not those"),
}


@pytest.mark.parametrize(("damage", "fault"), RECORDS.values(), ids=RECORDS)
def test_a_checkpoint_without_its_record_is_not_taken(run, origin, damage, fault):
    path = run.checkpoint / "step_6.json"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    assert_made_good(run, origin, SIX + fault, FOUR)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["step_6.pt"], "its bytes are not those that were written"),
        (["step_6.json"], "its bytes are not those that were written"),
        (["step_6.pt", "step_6.json"], "it is one of another run"),
    ],
    ids=["state", "record", "both"],
)
def test_a_checkpoint_of_another_run_is_not_taken(run, origin, names, fault):
    for name in names:
        shutil.copy(origin.other.checkpoint / name, run.checkpoint / name)
    assert_made_good(run, origin, SIX + fault, FOUR)


def test_a_checkpoint_of_another_step_is_not_taken(run, origin):
    for suffix in (".pt", ".json"):
        shutil.copy(run.checkpoint / f"step_4{suffix}", run.checkpoint / f"step_6{suffix}")
    assert_made_good(run, origin, SIX + r"its record step_6\.json is that of step_4\.pt", FOUR)


@pytest.mark.parametrize("damage", ["flipped", "deleted", "a folder"])
def test_damaged_operands_are_captured_again(run, origin, damage):
    path = run.path / "captured" / "step_3.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage == "flipped":
        path.write_bytes(flip(data))
    if damage == "a folder":
        path.mkdir()
    fault = r"of the operands that were written before it, captured/step_3\.safetensors: "
    assert_made_good(run, origin, SIX + fault, START)


def test_a_run_that_nobody_damaged_says_nothing(run, origin):
    assert assert_made_good(run, origin, None, None) == []


def assert_made_good(run: RunDir, origin: SimpleNamespace, fault: str | None, way: str | None) -> list[str]:
    """The run goes on, ends with the bytes of the run left in peace, and says the fault and where it went on; returns
    all that it says."""
    assert worker.main([str(run.path)]) == 0
    assert rows(run) == origin.whole
    assert (run.path / "captured" / "step_3.safetensors").read_bytes() == origin.captured
    assert list(checkpoints(run.checkpoint)) == [6, 8]
    repairs = run.manifest().get("repairs", [])
    named = [f"{run.name}: {line}" for line in repairs]
    assert result(run)["warnings"] == [*run.manifest().get("warnings", []), *named]
    if fault is None:
        assert repairs == []
    else:
        assert re.match(fault, repairs[0]) and repairs[0].endswith(f"; {way}"), repairs
    return repairs


def test_rows_that_change_while_the_run_writes_them_fail_it(tmp_path, origin):
    run = make_run(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        real = Trainer._advance

        def advance(self):
            if self.step == STOP - 1:
                run.jsonl("metrics").write_bytes(edit(run.jsonl("metrics").read_bytes()))
            return real(self)

        patch.setattr(Trainer, "_advance", advance)
        assert worker.main([str(run.path)]) == 3
    reason = run.status()["reason"]
    assert reason == f"{run.jsonl('metrics')}: was changed by another process while the run wrote it; run again"
    assert_made_good(run, origin, r"checkpoint/step_8\.pt: " + EARLY.format("metrics"), START)


def test_killed_between_a_checkpoint_and_its_record(tmp_path, origin):
    run = make_run(tmp_path)
    program = f"""
        import os, signal
        from hqsweep import worker
        from hqsweep.train import checkpoint
        real = checkpoint.write_record

        def write(path, record):
            if path.name == "step_6.pt":
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, record)

        checkpoint.write_record = write
        worker.main([{str(run.path)!r}])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in run.checkpoint.glob("step_6*")) == ["step_6.pt"]
    assert_made_good(run, origin, SIX + r"its record step_6\.json is not there", FOUR)
