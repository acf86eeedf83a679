"""Moments by indices: each order that is usual is found by its groups and shapes, and a wrong one is refused."""

import re
from pathlib import Path

import pytest
import torch
from support.checkpoints.tiny_models import equal, tiny, trained
from support.checkpoints.titan import titan

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError
from hqsweep.optim import FusedAdam
from tests.checkpoints.test_dcp import adam, same_moments

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_a_checkpoint_of_hugging_faces_trainer(model_type: str, tmp_path: Path) -> None:
    """Its optimizer has the parameters that decay first."""
    from transformers import Trainer, TrainingArguments

    saved, model = tiny(model_type, tie_word_embeddings=True), tiny(model_type, seed=1, tie_word_embeddings=True)
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=saved, args=arguments, train_dataset=rows)
    trainer.train()
    folder, other = tmp_path / "checkpoint-2", adam(model)
    description = inspect_checkpoint(folder)
    assert (description.optimizer, description.step, description.problems) == ("indexed", 2, ())
    loaded = load_checkpoint(folder, model, other)
    assert equal(saved, model)
    assert loaded.moments == len(list(model.parameters()))
    assert same_moments(saved, trainer.optimizer.optimizer, model, other)


def groups_of(model: torch.nn.Module, kind: str) -> list[dict] | list[torch.nn.Parameter]:
    everything = list(model.named_parameters())
    if kind == "matrices first":
        return [{"params": [p for _, p in everything if (p.dim() >= 2) == matrices]} for matrices in (True, False)]
    return everything if kind == "named" else [p for _, p in everything]


@pytest.mark.parametrize("kind", ["one group", "matrices first", "named"])
def test_a_file_of_torch(kind: str, tmp_path: Path) -> None:
    saved, model = tiny("qwen3"), tiny("qwen3", seed=1)
    optimizer, other = torch.optim.AdamW(groups_of(saved, kind)), adam(model)
    trained(saved, optimizer)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": 2}, tmp_path / "a.pt")
    description = inspect_checkpoint(tmp_path / "a.pt")
    assert (description.optimizer, description.step) == ("named" if kind == "named" else "indexed", 2)
    load_checkpoint(tmp_path / "a.pt", model, other)
    assert same_moments(saved, optimizer, model, other)


def test_torchtitans_names_by_index(tmp_path: Path) -> None:
    """Its order of w1, w2, w3 is not that of gate, up and down, which are all of one shape here."""
    shape = {"intermediate_size": 32, "num_key_value_heads": 4}
    saved, model = tiny("llama", **shape), tiny("llama", seed=1, **shape)
    named = dict(saved.named_parameters())
    names = [re.sub("up_proj|down_proj", lambda match: SWAPPED[match[0]], name) for name in named]
    optimizer = torch.optim.AdamW([named[name] for name in names])
    trained(saved, optimizer)
    weights = titan({name: named[name].detach() for name in names}, saved.config, permuted=True)
    state = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for index, name in enumerate(names):
        moments = {key: value for key, value in optimizer.state[named[name]].items() if key != "step"}
        turned = {
            key: next(iter(titan({name: value}, saved.config, permuted=True).values()))
            for key, value in moments.items()
        }
        state["state"][index] = turned | {"step": torch.tensor(2.0)}
    torch.save({"model": weights, "optimizer": state}, tmp_path / "a.pt")
    other = adam(model)
    load_checkpoint(tmp_path / "a.pt", model, other)
    assert equal(saved, model)
    assert same_moments(saved, optimizer, model, other)


SWAPPED = {"up_proj": "down_proj", "down_proj": "up_proj"}


def test_rates_and_betas_stay_and_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    optimizer, other = FusedAdam(saved.parameters(), lr=3e-3), FusedAdam(model.parameters(), lr=3e-3)
    trained(saved, optimizer)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    torch.save({"model": saved.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    load_checkpoint(tmp_path / "a.pt", model, other)
    assert other.param_groups[0]["lr"] == 3e-3
    for one, its in ((saved, optimizer), (model, other)):
        torch.manual_seed(3)
        trained(one, its)
    assert equal(saved, model)


def test_masters_are_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """Not their rounding to the parameter's dtype."""
    saved, model = tiny("llama"), tiny("llama", seed=1).to(torch.bfloat16)
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    optimizer = FusedAdam(model.parameters(), lr=0.0, weight_decay=0.0)
    load_checkpoint(tmp_path / "a.pt", model, optimizer)
    trained(model, optimizer, steps=1)
    masters = {name: optimizer.master_param(p) for name, p in model.named_parameters()}
    assert all(torch.equal(masters[name], p) for name, p in saved.named_parameters())


def test_another_order_is_refused(tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    optimizer = torch.optim.AdamW(list(saved.parameters())[::-1])
    trained(saved, optimizer)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="by indices, of groups of 21 parameters, in no order that is known"):
        load_checkpoint(tmp_path / "a.pt", model, adam(model))
    assert load_checkpoint(tmp_path / "a.pt", model).moments == 0


def test_a_state_that_is_not_adams(tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    trained(saved, optimizer)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="holds momentum_buffer, which is not Adam's; load the weights alone"):
        load_checkpoint(tmp_path / "a.pt", model, adam(model))
