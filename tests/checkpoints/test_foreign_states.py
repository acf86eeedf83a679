"""What accelerate, FSDP and DeepSpeed write beside weights is read, or refused by a sentence that says what to do."""

import json
import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_cp
from support.checkpoints.tiny_models import equal, tiny, trained
from torch import Tensor

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import check_fits, load_checkpoint
from hqsweep.errors import UserError
from tests.checkpoints.test_dcp import adam, same_moments
from tests.checkpoints.test_torch_file import Code


@pytest.fixture
def saved():
    """A trained model, its optimizer, and the optimizer's state by names, as FSDP has it."""
    model = tiny("llama", tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return model, optimizer, {"state": state, "param_groups": [{"lr": 1e-3, "params": names}]}


def taken(folder: Path, saved: tuple) -> bool:
    """Whether a model with other weights has those of the folder, and its optimizer the moments."""
    model = tiny("llama", seed=1, tie_word_embeddings=True)
    optimizer = adam(model)
    loaded = load_checkpoint(folder, model, optimizer)
    return equal(saved[0], model) and same_moments(saved[0], saved[1], model, optimizer) and loaded.moments > 0


def in_parts(model: torch.nn.Module, folder: Path) -> None:
    """Two .bin files and their index, as transformers wrote before safetensors."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    files = {name: f"pytorch_model-0000{1 + (i > 9)}-of-00002.bin" for i, name in enumerate(weights)}
    for file in set(files.values()):
        torch.save({name: weights[name] for name in weights if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model.config.save_pretrained(folder)


def test_several_bin_files_with_an_index(saved, tmp_path):
    in_parts(saved[0], tmp_path)
    torch.save(saved[2], tmp_path / "optimizer.bin")
    description = inspect_checkpoint(tmp_path)
    assert (description.kind, description.optimizer, description.problems, description.config) == (
        "torch", "named", (), tmp_path / "config.json"
    )  # fmt: skip
    assert taken(tmp_path, saved)
    before = description.sha256
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(UserError, match=r"1 of the 2 files of pytorch_model.bin.index.json are not there: .*-00002-of"):
        load_checkpoint(tmp_path, saved[0])
    in_parts(tiny("llama", seed=2, tie_word_embeddings=True), tmp_path)
    assert inspect_checkpoint(tmp_path).sha256 != before


def test_a_whole_state_of_fsdp_beside_safetensors(saved, tmp_path):
    saved[0].save_pretrained(tmp_path)
    torch.save(saved[2], tmp_path / "optimizer.bin")
    assert inspect_checkpoint(tmp_path).optimizer == "named" and taken(tmp_path, saved)


@pytest.mark.parametrize("weights", ["safetensors", "sharded", "whole"])
def test_a_sharded_state_of_fsdp(weights, saved, tmp_path):
    if weights == "safetensors":
        saved[0].save_pretrained(tmp_path)
    elif weights == "whole":
        torch.save(saved[0].state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    else:
        dist_cp.save({"model": saved[0].state_dict()}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    dist_cp.save({"optimizer": saved[2]}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    description = inspect_checkpoint(tmp_path)
    assert description.optimizer == "named" and taken(tmp_path, saved)
    before, part = description.sha256, next((tmp_path / "optimizer_0").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert inspect_checkpoint(tmp_path).sha256 != before


@dataclass
class fragment_address:
    numel: int
    start: int


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1


@contextmanager
def as_deepspeeds(monkeypatch):
    """With the classes above in modules of deepspeed, which transformers would take for the library."""
    owners = {"deepspeed.utils.tensor_fragment": fragment_address, "deepspeed.loss_scaler": LossScaler}
    with monkeypatch.context() as patched:
        for name in ("deepspeed", "deepspeed.utils", *owners):
            patched.setitem(sys.modules, name, ModuleType(name))
        for name, own in owners.items():
            setattr(sys.modules[name], own.__name__, own)
            patched.setattr(own, "__module__", name)
        yield


@pytest.fixture
def zero(saved, tmp_path, monkeypatch):
    """Writes a folder of ZeRO of 2 ranks in the layout of stage 2 or 3, with objects of deepspeed in it."""
    model, optimizer, _ = saved
    moments = {name: optimizer.state[p] for name, p in model.named_parameters()}
    names = list(moments)
    groups = [names[:7], names[7:]]

    def write(stage: int, **more: Any) -> Path:
        folder = tmp_path / f"checkpoint-{stage}"
        inside = folder / "global_step2"
        inside.mkdir(parents=True)
        model.save_pretrained(folder)
        (folder / "latest").write_text("global_step2")
        for rank in range(2):
            parts = [(of_stage_2 if stage < 3 else of_stage_3)(moments, group, rank) for group in groups]
            flat = {i: {"step": torch.tensor(2.0), **states} for i, (states, _) in enumerate(parts)}
            state = {"loss_scaler": LossScaler(), "zero_stage": stage, "partition_count": 2 if stage == 3 else [2, 2]}
            if stage < 3:
                state |= {"base_optimizer_state": {"state": flat}, "param_slice_mappings": [m for _, m in parts]}
            else:
                state |= {"optimizer_state_dict": {"state": flat}}
            name = f"zero_pp_rank_{rank}_mp_rank_00"
            with as_deepspeeds(monkeypatch):
                torch.save({"optimizer_state_dict": state | more}, inside / f"bf16_{name}_optim_states.pt")
            shapes = [{name: moments[name]["exp_avg"].shape for name in group} for group in groups]
            torch.save({"param_shapes": shapes}, inside / f"{name}_model_states.pt")
        return folder

    return write


def of_stage_2(moments: dict, group: list[str], rank: int) -> tuple[dict[str, Tensor], dict]:
    """The half of a rank of a flat group, and what lies where in it; a parameter may be cut."""
    sizes = {name: moments[name]["exp_avg"].numel() for name in group}
    half = -(-sum(sizes.values()) // 2)
    states, mapping, start = {}, {}, 0
    for key in ("exp_avg", "exp_avg_sq"):
        whole = torch.cat([moments[name][key].flatten() for name in group])
        states[key] = torch.nn.functional.pad(whole, (0, 2 * half - len(whole)))[rank * half : (rank + 1) * half]
    for name, size in sizes.items():
        first, last = max(start, rank * half), min(start + size, (rank + 1) * half)
        if first < last:
            mapping[name] = fragment_address(numel=last - first, start=first - rank * half)
        start += size
    return states, mapping


def of_stage_3(moments: dict, group: list[str], rank: int) -> tuple[dict[str, Tensor], None]:
    """The half of a rank of every parameter, one after another."""
    states: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": []}
    for key, parts in states.items():
        for name in group:
            flat = moments[name][key].flatten()
            half = math.ceil(len(flat) / 2)
            parts.append(torch.nn.functional.pad(flat, (0, 2 * half - len(flat)))[rank * half : (rank + 1) * half])
    return {key: torch.cat(parts) for key, parts in states.items()}, None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_of_deepspeeds_zero(stage, zero, saved):
    folder = zero(stage)
    assert (description := inspect_checkpoint(folder)).optimizer == "named" and description.notes == ()
    assert taken(folder, saved)


def test_what_of_deepspeed_is_refused(zero, saved, tmp_path):
    folder = zero(2, more=Code(tmp_path / "made"))
    with pytest.raises(UserError, match=r"it holds an object of Python, posix.mkdir, which is not loaded"):
        taken(folder, saved)
    assert not (tmp_path / "made").exists()
    folder = zero(3)
    last = folder / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(UserError, match="2 ranks have written the optimizer's state, and 1 files are there"):
        taken(folder, saved)
    last.with_name("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").write_bytes(content)
    assert "its ranks share tensors or experts, and not data alone" in inspect_checkpoint(folder).notes[0]
    assert load_checkpoint(folder, saved[0]).moments == 0


def test_a_layout_that_is_none_of_zeros(zero, saved):
    folder = zero(1, param_slice_mappings=[{"a": 1}])
    with pytest.raises(UserError, match=r"its layout is not that of ZeRO's stages 1 to 3 \(AttributeError"):
        taken(folder, saved)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["latest"], "its weights are in the parts of DeepSpeed's ranks; `python zero_to_fp32.py"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "it is the folder of one step of DeepSpeed's ranks; give"),
        (["pytorch_model_fsdp_rank0.bin"], "its weights are a file of each rank of FSDP; save it with use_dcp=True"),
        (["mp_rank_00/model_optim_rng.pt"], "is a checkpoint of Megatron-Core, .* export it to Hugging Face"),
        ([".metadata", "common.pt", "metadata.json"], "is a checkpoint of Megatron-Core, .* export it to Hugging Face"),
    ],
)
def test_what_is_named_and_refused(names, message, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    with pytest.raises(UserError, match=message):
        inspect_checkpoint(tmp_path)


def test_a_checkpoint_without_one_name_of_the_model_is_refused_beforehand(tmp_path):
    torch.save({"a.weight": torch.zeros(3, 3)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a.pt: .*a.weight"):
        check_fits(inspect_checkpoint(tmp_path / "a.pt"), tiny("llama"))


def test_a_checkpoint_with_all_names_of_the_model_and_more_is_refused_beforehand(tmp_path):
    model = tiny("llama")
    more = {"model.layers.0.self_attn.q_norm.weight": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(model.state_dict() | more, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a.pt: 1 of its tensors are none of the model: .*q_norm.weight"):
        check_fits(inspect_checkpoint(tmp_path / "a.pt"), model)
    model._keys_to_ignore_on_load_unexpected = [r"q_norm"]
    check_fits(inspect_checkpoint(tmp_path / "a.pt"), model)
