"""Files of torch.save that are none, or that hold more than tensors, are refused by what is wrong with them."""

import hashlib
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from support.checkpoints.tiny_models import tiny

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError
from hqsweep.train.checkpoint import read_state
from hqsweep.train.record import NotAsWritten


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


NO_FILE = "it is no file of torch.save with tensors and plain containers alone; save the state_dict of the model"
FOREIGN = {
    "garbage": (b"garbage" * 100, NO_FILE),
    "a pickle": (pickle.dumps({"a": Code(Path("made"))}), NO_FILE),
    "an old pickle": (pickle.dumps({"a": Code(Path("made"))}, 0), NO_FILE),
    "a new pickle": (pickle.dumps({"a": 1}, 5), NO_FILE),
    "an instruction": (b"\x80\x02}q\x00(X\x01\x00\x00\x00a\x94K\x01u.", NO_FILE),
    "a script": (None, "it is a TorchScript archive; save the state_dict of the model"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_torch_advises_and_warns_of_reaches_nobody(name: str, tmp_path: Path) -> None:
    """torch says how to run what it refuses, which nobody shall do with a file of others."""
    content, problem = FOREIGN[name]
    path = tmp_path / "a.pt"
    if content is None:
        with warnings.catch_warnings(action="ignore"):
            torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))
    else:
        path.write_bytes(content)
    with warnings.catch_warnings(action="error"):
        assert inspect(path) == problem
        with pytest.raises(UserError) as caught:
            load_checkpoint(path, tiny("llama"))
    assert str(caught.value) == f"{path}: {problem}"


def test_a_trunk_that_is_no_checkpoint_is_refused_without_the_advice(tmp_path: Path) -> None:
    path = tmp_path / "step_9.pt"
    path.write_bytes(pickle.dumps({"a": Code(tmp_path / "made")}))
    with warnings.catch_warnings(action="error"), pytest.raises(NotAsWritten) as caught:
        read_state(path, torch.device("cpu"), hashlib.sha256(path.read_bytes()).hexdigest())
    assert NO_FILE in str(caught.value) and "weights_only" not in str(caught.value)
