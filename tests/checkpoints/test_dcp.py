"""Folders of torch.distributed.checkpoint, as torchtitan's: their tensors are loaded, and no code of them runs."""

import io
import os
import pickle
from enum import Enum
from pathlib import Path

import pytest
import torch
from support.checkpoints.tiny_models import equal, tiny, trained
from support.checkpoints.titan import titan, write, write_titan
from torch.distributed.checkpoint.metadata import Metadata

from hqsweep.checkpoints import dcp
from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def same_moments(model, optimizer, other, other_optimizer) -> bool:
    """Whether two optimizers hold the same moments and steps of parameters of the same names."""
    there = dict(other.named_parameters())
    pairs = [(optimizer.state[p], other_optimizer.state[there[name]]) for name, p in model.named_parameters()]
    return all(torch.equal(one[key], two[key]) for one, two in pairs for key in ("exp_avg", "exp_avg_sq", "step"))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("newer", [False, True], ids=["wq", "qkv_linear.wq"])
def test_torchtitan_with_moments(model_type: str, newer: bool, tmp_path: Path) -> None:
    saved, model = tiny(model_type, head_dim=8), tiny(model_type, seed=1, head_dim=8)
    optimizer, other = adam(saved), adam(model)
    trained(saved, optimizer)

    def change(name: str) -> str:
        return name.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo") if newer else name

    folder = write_titan(saved, optimizer, tmp_path / "step-2", change)
    description = inspect_checkpoint(folder)
    assert (description.kind, description.step, description.optimizer, description.problems) == ("dcp", 2, "named", ())
    assert description.tensors["tok_embeddings.weight"] == ((64, 32), "float32")
    loaded = load_checkpoint(folder, model, other)
    assert equal(saved, model)
    assert same_moments(saved, optimizer, model, other)
    assert loaded.moments == len(list(model.parameters()))
    permuted = [name for name, _ in model.named_parameters() if "q_proj" in name or "k_proj" in name]
    assert sorted(loaded.permuted) == sorted(permuted if model_type == "llama" else [])


def test_q_k_and_v_in_one_weight(tmp_path: Path) -> None:
    saved, model = tiny("qwen3", head_dim=8), tiny("qwen3", seed=1, head_dim=8)
    state = titan({name: p.detach() for name, p in saved.named_parameters()}, saved.config, permuted=False)
    for layer in range(2):
        lead = f"layers.{layer}.attention."
        q, k, v = (state.pop(f"{lead}w{kind}.weight").unflatten(0, (2, -1)) for kind in "qkv")
        state[f"{lead}qkv_linear.wqkv.weight"] = torch.cat([q, k, v], dim=1).flatten(0, 1)
    load_checkpoint(write(state, tmp_path / "step-2"), model)
    assert equal(saved, model)


def test_names_of_hugging_face_under_model(tmp_path: Path) -> None:
    """Checkpoints are nested as in torch's own tutorial: {"model": ..., "optimizer": ...}."""
    saved, model = tiny("llama"), tiny("llama", seed=1)
    optimizer, other = adam(saved), adam(model)
    trained(saved, optimizer)
    state = {name: optimizer.state[p] for name, p in saved.named_parameters()}
    write({"model": saved.state_dict(), "optimizer": {"state": state}}, tmp_path / "a")
    assert load_checkpoint(tmp_path / "a", model, other).moments == 21
    assert equal(saved, model)
    assert same_moments(saved, optimizer, model, other)


@pytest.mark.parametrize("name", ["os.system", "builtins.getattr", "torch.load", "torch.distributed.checkpoint.load"])
def test_a_forged_metadata_runs_nothing(name: str, tmp_path: Path) -> None:
    """Whatever name it asks for that is not one of a record."""
    module, _, function = name.rpartition(".")
    mark = tmp_path / "made"
    code = f"c{module}\n{function}\n(Vtouch {mark}\ntR.".encode()
    (tmp_path / ".metadata").write_bytes(code)
    description = inspect_checkpoint(tmp_path)
    assert f"its .metadata asks for {name}" in description.problems[0]
    with pytest.raises(UserError, match="nothing of it was run"):
        load_checkpoint(tmp_path, tiny("llama"))
    assert not mark.exists()


class EarlyPickler(pickle.Pickler):
    """Writes members of enumerations as Python before 3.11.4 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_metadata_of_python_before_3_11_4(tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    path = write({"model": saved.state_dict()}, tmp_path / "a") / ".metadata"
    with path.open("rb+") as file:
        metadata = pickle.load(file)
        file.seek(0)
        file.truncate()
        EarlyPickler(file).dump(metadata)
    assert b"getattr" in path.read_bytes()
    load_checkpoint(tmp_path / "a", model)
    assert equal(saved, model)


class Code:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_among_the_tensors_runs_not(tmp_path: Path) -> None:
    """In the bytes of a tensor, and in those of an object that is none, which are not read."""
    folder = write({"w": torch.zeros(400), "train_state": {"code": Code(tmp_path / "made")}}, tmp_path / "a")
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    chunk = dcp.tensors_of(folder)["w"].chunks[0]
    forged = io.BytesIO()
    torch.save(Code(tmp_path / "made"), forged)
    assert len(forged.getvalue()) <= chunk.length
    content[chunk.start : chunk.start + chunk.length] = forged.getvalue().ljust(chunk.length, b"\0")
    load_checkpoint(folder, Weight())
    file.write_bytes(content)
    with pytest.raises(UserError, match="the bytes of w are no such tensor"):
        load_checkpoint(folder, Weight())
    assert not (tmp_path / "made").exists()


class Weight(torch.nn.Module):
    """One parameter "w"."""

    def __init__(self, size: int = 400) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(size))


def change_metadata(folder: Path, change) -> None:
    """Write .metadata anew."""
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../secret.pt", "/etc/passwd", "a/b", ".."])
def test_a_path_outside_the_folder(name: str, tmp_path: Path) -> None:
    folder = write({"w": torch.zeros(4)}, tmp_path / "a")

    def outside(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    change_metadata(folder, outside)
    assert "which is none of its folder" in inspect_checkpoint(folder).problems[0]
    with pytest.raises(UserError, match=r"names the file '.*', which is none of its folder"):
        load_checkpoint(folder, Weight(4))


def test_half_a_folder(tmp_path: Path) -> None:
    folder = write({"w": torch.zeros(400)}, tmp_path / "a")
    whole = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(whole[:-1])
    assert "__0_0.distcp has" in inspect_checkpoint(folder).problems[0]
    (folder / "__0_0.distcp").rename(folder / "__0_1.distcp")
    assert "1 of its 1 files are not there: __0_0.distcp" in inspect_checkpoint(folder).problems[0]
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert "its .metadata is cut short or damaged" in inspect_checkpoint(folder).problems[0]
    (folder / ".metadata").unlink()
    assert "half a checkpoint" in inspect_checkpoint(folder).problems[0]


def test_parts_of_a_tensor(tmp_path: Path) -> None:
    """A tensor of two processes; one whose part is not there is named."""
    folder = write({"w": torch.arange(6.0), "x": torch.arange(6.0, 10.0)}, tmp_path / "a")

    def join(metadata: Metadata) -> None:
        (a, first), (b, second) = sorted(metadata.storage_data.items(), key=lambda pair: pair[0].fqn)
        entry, rest = metadata.state_dict_metadata["w"], metadata.state_dict_metadata.pop("x").chunks[0]
        entry.size, rest.offsets = torch.Size([10]), torch.Size([6])
        entry.chunks.append(rest)
        metadata.storage_data = {a: first, type(b)("w", (6,)): second}

    change_metadata(folder, join)
    model = Weight(10)
    load_checkpoint(folder, model)
    assert torch.equal(model.w, torch.arange(10.0))
    change_metadata(folder, lambda metadata: metadata.state_dict_metadata["w"].chunks.pop())
    assert "has not all parts of w" in inspect_checkpoint(folder).problems[0]


def test_moments_are_not_half_taken(tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    optimizer = adam(saved)
    trained(saved, optimizer)
    state = {name: dict(optimizer.state[p]) for name, p in saved.named_parameters()}
    for change, message in [
        (lambda: state["model.norm.weight"].update(exp_avg=torch.zeros(3)), r"moments of model.norm.weight are not of"),
        (lambda: state["model.norm.weight"].update(momentum_buffer=torch.zeros(3)), "not Adam's"),
        (lambda: state.pop("model.norm.weight"), "its optimizer's state lacks 1 of 21 parameters: model.norm.weight"),
    ]:
        change()
        folder = write({"model": saved.state_dict(), "optimizer": {"state": state}}, tmp_path / message[:3])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(UserError, match=message):
            load_checkpoint(folder, model, adam(model))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert load_checkpoint(folder, tiny("llama", seed=2)).moments == 0


def test_torchtitans_names_of_a_model_that_is_not_known(tmp_path: Path) -> None:
    folder = write({"tok_embeddings.weight": torch.zeros(64, 32)}, tmp_path / "a")
    with pytest.raises(UserError, match="torchtitan's are known for llama, qwen3, qwen3_moe, and the model is mixtral"):
        load_checkpoint(folder, tiny("mixtral"))
