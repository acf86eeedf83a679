"""Folders of safetensors: half a copy is found from headers and sizes, before anything is read."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints.tiny_models import tiny

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in several files, with its index."""
    tiny("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def problem(folder: Path) -> str:
    """The first problem of a checkpoint, which load_checkpoint says too."""
    fault = inspect_checkpoint(folder).problems[0]
    with pytest.raises(UserError) as error:
        load_checkpoint(folder, tiny("llama"))
    assert fault in str(error.value)
    return fault


def first(folder: Path) -> Path:
    """Its first file of weights."""
    return min(folder.glob("model-*.safetensors"))


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_file_that_is_not_there(folder: Path) -> None:
    count, name = len(list(folder.glob("model-*"))), first(folder).name
    first(folder).unlink()
    assert problem(folder) == f"1 of the {count} files of {INDEX} are not there: {name}"


def test_no_index(folder: Path) -> None:
    count = len(list(folder.glob("model-*")))
    (folder / INDEX).unlink()
    assert problem(folder) == f"{count} files of weights and no {INDEX}: half a checkpoint; copy it again"


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_that_is_cut_short(length: int, folder: Path) -> None:
    content = first(folder).read_bytes()
    first(folder).write_bytes(content[:length])
    assert first(folder).name in problem(folder)


def test_a_file_that_is_too_long(folder: Path) -> None:
    first(folder).write_bytes(first(folder).read_bytes() + b"\0")
    assert "copy it again" in problem(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "its header is no JSON"),
        (b"{", "its header is no JSON"),
        (b"[" * 5000, "its header is no JSON"),
        (b'{"w": 3}', "its header describes no tensors"),
        (b'{"w": {"shape": ["x"], "dtype": "F32", "data_offsets": [0, 4]}}', "its header describes no tensors"),
    ],
)
def test_a_header_that_is_none(header: bytes, message: str, folder: Path) -> None:
    first(folder).write_bytes(len(header).to_bytes(8, "little") + header)
    assert message in problem(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
def test_a_file_outside_the_folder(name: str, folder: Path) -> None:
    change_index(folder, lambda index: index.update({"model.norm.weight": name}))
    assert problem(folder) == f"{INDEX} names the file {name!r}, which is none of its folder"


def test_a_tensor_that_no_file_has(folder: Path) -> None:
    change_index(folder, lambda index: index.update({"model.more.weight": first(folder).name}))
    assert problem(folder) == f"{INDEX} names 1 tensors that its files lack: model.more.weight"


def test_an_index_that_is_none(folder: Path) -> None:
    (folder / INDEX).write_text("{}")
    assert problem(folder) == f"{INDEX} is no index: it has no weight_map"


def test_half_of_the_optimizers_state(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"PK\3\4 and no more")
    assert "optimizer.pt is cut short" in problem(folder)


def test_what_is_not_read_is_said(folder: Path) -> None:
    (folder / "latest").write_text("global_step3")
    assert inspect_checkpoint(folder).notes == (
        "the optimizer's state of DeepSpeed is not read: the folder that latest names is not there",
    )


def test_the_hash_is_of_weights_config_and_optimizer(folder: Path) -> None:
    before = inspect_checkpoint(folder).sha256
    assert before == inspect_checkpoint(folder).sha256
    (folder / "README.md").write_text("more")
    assert before == inspect_checkpoint(folder).sha256
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config + " ")
    assert before != inspect_checkpoint(folder).sha256
    one = inspect_checkpoint(first(folder))
    assert one.sha256 == hashlib.sha256(first(folder).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json"], "it has a config.json and no weights"),
        (["adapter_model.safetensors"], "an adapter of PEFT alone; merge it"),
        (["checkpoint-5/x", "checkpoint-10/x"], "it holds checkpoint-10, checkpoint-5; give one of them"),
        (["checkpoint/step_3.pt"], "it is the folder of a run; give one of its checkpoints, such as .*step_3.pt"),
        ([], "give a Hugging Face folder with safetensors"),
    ],
)
def test_folders_that_are_no_checkpoint(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=message):
        inspect_checkpoint(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.txt").write_text("")
    for name, message in [
        ("x", "is not there; give"),
        ("config.json", "is a part of a checkpoint; give its folder"),
        ("a.txt", "is no checkpoint that is known by its name"),
    ]:
        with pytest.raises(UserError, match=message):
            inspect_checkpoint(tmp_path / name)


def test_inspecting_safetensors_imports_no_torch(folder: Path) -> None:
    code = "import hqsweep, sys; c = hqsweep.inspect_checkpoint(sys.argv[1]); c.check(), c.sha256, c.parameters;"
    code += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, folder], check=False).returncode == 0
