"""Files of torch.save that are none, or that hold more than tensors, are refused by what is wrong with them."""

import os
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.load import load_checkpoint
from hqsweep.errors import UserError


class Code:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_file_runs_not(legacy: bool, tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(3)}, "more": Code(tmp_path / "made")}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    description = inspect_checkpoint(tmp_path / "a.pt")
    assert "it holds an object of Python, posix.mkdir, which is not loaded" in description.problems[0]
    with pytest.raises(UserError, match=r"a.pt: it holds an object of Python, posix.mkdir"):
        load_checkpoint(tmp_path / "a.pt", tiny("llama"))
    assert not (tmp_path / "made").exists()


def test_a_whole_module_is_no_state_dict(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    assert "torch.nn.modules.linear.Linear, which is not loaded; save the state_dict" in inspect(tmp_path / "a.pt")


def inspect(path: Path) -> str:
    """The one problem of a checkpoint."""
    (problem,) = inspect_checkpoint(path).problems
    return problem


@pytest.mark.parametrize("length", [0, 5, 600, -100])
def test_a_file_that_is_cut_short(length: int, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(500)}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content[:length])
    assert inspect(tmp_path / "a.pt") == "it is cut short, or no file of torch.save; copy it again"


@pytest.mark.parametrize("state", [{"a": 1}, {"model": {"a": 1}}, [torch.zeros(2)], torch.zeros(2)])
def test_a_file_without_a_state_dict(state: object, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert "it holds no state_dict (" in inspect(tmp_path / "a.pt")


def test_the_state_of_a_run_is_told_apart(tmp_path: Path) -> None:
    state = dict.fromkeys(("trunk", "loss_sum", "loss_count"), 0) | {"step": 9, "model": {"w": torch.zeros(2)}}
    torch.save(state | {"optimizer": {"state": {}, "param_groups": []}}, tmp_path / "step_9.pt")
    description = inspect_checkpoint(tmp_path / "step_9.pt")
    assert (description.kind, description.step, description.optimizer, description.parameters) == (
        "hqsweep",
        9,
        "none",
        2,
    )
