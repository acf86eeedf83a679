"""Checkpoints of a run over ranks: folders that torch.distributed.checkpoint writes, in a place of step_N.pt."""

from dataclasses import dataclass, field

import pytest
import torch
from cases import DELAYED_IN_PARTS
from support.parallel.checkpointed import content, resumed
from support.parallel.sharded_training import assert_same
from support.parallel.training_ranks import config, trainer
from support.ranks import run_ranks
from torch import nn

from hqsweep.errors import UserError
from hqsweep.train.checkpoint import go_on_from, newest, save_checkpoint
from hqsweep.train.record import NotAsWritten, check_recorded, checkpoints, record_path

DELAYED = DELAYED_IN_PARTS
LOCAL = "fp8_delayed+local_amax+history16"
CASES = [
    (DELAYED, {"parallel": {"dp_shard": 2}, "log_every": 3}),
    ("mxfp8", {"parallel": {"dp_replicate": 2}}),
    (LOCAL, {"parallel": {"dp_shard": 2}}),
]


@pytest.mark.slow
def test_a_resumed_run_over_ranks_is_the_one_without_a_break(tmp_path):
    run_ranks(2, resumed, tmp_path, CASES)
    folder = tmp_path / "0"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2", "step_2.json", "step_3", "step_3.json"]
    assert list(checkpoints(folder)) == [2, 3]
    record = check_recorded(folder / "step_3")
    assert (record.run, record.bytes) == ("r", sum(path.stat().st_size for path in (folder / "step_3").iterdir()))
    one = trainer(config(DELAYED, steps=4))
    go_on_from(one, folder / "step_3")  # in one process
    assert one.step == 3 and all(torch.isfinite(value).all() for value in content(one).values())
    other = trainer(config(DELAYED, steps=4))
    go_on_from(other, folder / "step_3")
    assert_same(content(one), content(other))
    with pytest.raises(UserError, match=r"2 ranks wrote it, but 1 load it; take 2, or a format without \+local_amax"):
        go_on_from(trainer(config(LOCAL, steps=4)), tmp_path / "2" / "step_3")


@dataclass
class Saved:
    """What save_checkpoint takes for a Trainer over ranks, in this process alone."""

    step: int
    model: nn.Module = field(default_factory=lambda: nn.Linear(4, 4))
    optimizer: None = None
    ranks: str = "one"
    kept: tuple[int, ...] = ()

    def position(self) -> dict:
        return {"step": self.step}


@pytest.mark.parametrize("how", ["changed", "short", "absent", "more", "no record"])
def test_a_folder_that_is_not_what_was_written_is_passed_over(tmp_path, how):
    for step in (2, 3):
        save_checkpoint(Saved(step), tmp_path)
    folder = tmp_path / "step_3"
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    if how == "changed":
        data[len(data) // 2] ^= 1
    file.write_bytes(data[: -1 if how == "short" else None])
    if how == "absent":
        file.unlink()
    elif how == "more":
        (folder / "__1_0.distcp").write_bytes(b"")
    elif how == "no record":
        record_path(folder).unlink()
    with pytest.raises(NotAsWritten, match="step_3"):
        check_recorded(folder)
    path, faults = newest(tmp_path, lambda path, record: None)
    assert path == tmp_path / "step_2" and list(faults) == [folder]
