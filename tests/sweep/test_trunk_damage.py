"""A trunk whose states or rows were damaged: no fork begins there, and the same command trains it again."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.sweep import kill_sweep

from hqsweep import worker
from hqsweep.sweep.store.names import run_name
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.train.loop import Trainer
from hqsweep.train.record import checkpoints, discard, record_path

pytestmark = pytest.mark.slow

FORK = {"at": [4, 6], "steps": 2, "decay": 2, "warmup": 2}
TRAIN = kill_sweep.CONFIG["train"] | {"checkpoint_every": 2, "eval_every": 3}


def create(root: Path, seed: int = 0) -> tuple[RunDir, RunDir]:
    """A trunk and its fork at step 6, as the sweep's command makes them, again and again."""
    trunk = kill_sweep._point("bf16", seed=seed, fork=FORK, train=TRAIN | {"steps": 6}, stats={"every": 2})
    section = FORK | {"at": [6], "trunk": run_name(trunk.config)}
    fork = kill_sweep._point("nvfp4", seed=seed, fork=section, train=TRAIN | {"steps": 10}, stats={"every": 2})
    return tuple(RunStore(root).create(sweep="killed", conf="killed", overrides=[], runs=[trunk, fork]))


def work(run: RunDir) -> int:
    return worker.main([str(run.path)])


@pytest.fixture(autouse=True, scope="module")
def handlers() -> Iterator[None]:
    """pytest's own signal handlers, back again at the end."""
    before = {number: signal.getsignal(number) for number in (*worker.STOP_SIGNALS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> SimpleNamespace:
    """rows: of a trunk and its fork that were left in peace; root: the same with the fork to do; other: another seed's
    trunk."""
    folder = tmp_path_factory.mktemp("trunks")
    runs, (trunk, _), (other, _) = create(folder / "whole"), create(folder / "root"), create(folder / "other", seed=1)
    assert [work(run) for run in (*runs, trunk, other)] == [0] * 4
    return SimpleNamespace(rows=kill_sweep.rows(list(runs)), root=folder / "root", other=other)


@pytest.fixture
def root(origin, tmp_path) -> Path:
    return shutil.copytree(origin.root, tmp_path / "runs")


def flip(origin: SimpleNamespace, state: Path) -> None:
    data = state.read_bytes()
    state.write_bytes(data[:1000] + bytes([data[1000] ^ 4]) + data[1001:])


def empty(origin: SimpleNamespace, state: Path) -> None:
    state.write_bytes(b"")


def forget(origin: SimpleNamespace, state: Path) -> None:
    record_path(state).unlink()


def delete(origin: SimpleNamespace, state: Path) -> None:
    discard(state)


def swap(origin: SimpleNamespace, state: Path) -> None:
    for path in (state, record_path(state)):
        shutil.copy(origin.other.checkpoint / path.name, path)


def link(origin: SimpleNamespace, state: Path) -> None:
    state.unlink()
    state.symlink_to(origin.other.checkpoint / state.name)


FAULTS = {
    flip: "its bytes are not those that were written",
    empty: "it is empty, and",
    forget: "its record step_6.json is not there",
    swap: "it is one of another run",
    link: "its bytes are not those that were written",
    delete: None,
}


@pytest.mark.parametrize(("damage", "fault"), FAULTS.items(), ids=[damage.__name__ for damage in FAULTS])
def test_a_damaged_state_is_trained_again_by_the_same_command(root, origin, damage, fault):
    trunk, fork = create(root)
    theirs = (origin.other.checkpoint / "step_6.pt").read_bytes()
    damage(origin, trunk.checkpoint / "step_6.pt")
    if fault:
        assert work(fork) == 3
        reason = fork.status()["reason"]
        assert reason.startswith(f"{trunk.checkpoint / 'step_6.pt'}: {fault}")
        assert reason.endswith(f"no state of the trunk {trunk.name}; the sweep's command trains the trunk again")
    assert create(root) == (trunk, fork)
    assert trunk.status()["state"] == "pending" and list(checkpoints(trunk.checkpoint)) == [4]
    assert (work(trunk), work(fork)) == (0, 0)
    assert kill_sweep.rows([trunk, fork]) == origin.rows
    assert (origin.other.checkpoint / "step_6.pt").read_bytes() == theirs
    repairs = trunk.manifest().get("repairs", [])
    assert [line.split("; ")[-1] for line in repairs] == ["the trunk was trained again to that point"] * bool(fault)
    assert create(root) == (trunk, fork) and trunk.has_finished()


def test_a_trunk_whose_rows_were_cut_begins_again_and_keeps_its_states(root, origin):
    trunk, fork = create(root)
    trunk.write_status(state="interrupted")
    states = {path: path.read_bytes() for path in checkpoints(trunk.checkpoint).values()}
    trunk.jsonl("metrics").write_bytes(b"")
    create(root)
    seen, real = [], Trainer._advance

    def advance(self):
        seen.append((self.step, sorted(path.name for path in states if path.exists())))
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_advance", advance)
        assert work(trunk) == 0
    assert seen[0] == (0, ["step_4.pt", "step_6.pt"]) and len(seen) == 6
    assert len(trunk.manifest()["repairs"]) == 2
    assert {path: path.read_bytes() for path in checkpoints(trunk.checkpoint).values()} == states
    assert work(fork) == 0
    assert kill_sweep.rows([trunk, fork]) == origin.rows


def test_a_point_before_a_sound_state_is_made_up_for(root, origin):
    trunk, fork = create(root)
    flip(origin, trunk.checkpoint / "step_4.pt")
    trunk.write_status(state="interrupted")
    assert work(trunk) == 0
    assert list(checkpoints(trunk.checkpoint)) == [4, 6]
    (line,) = trunk.manifest()["repairs"]
    fault = "checkpoint/step_4.pt: its bytes are not those that were written"
    assert line == f"{fault}; the trunk was trained again to that point"
    assert work(fork) == 0
    assert kill_sweep.rows([trunk, fork]) == origin.rows
    assert fork.manifest()["trunk_sha256"] and fork.manifest()["trunk_val_loss"] > 0
