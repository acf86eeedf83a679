"""Folders that a program of torch alone loads strictly, as torchtitan does, and folders that it wrote."""

import pytest
import torch
from support.checkpoints.plain_torch import Plain, content, load, save, state_of, to_and_fro
from support.parallel.sharded_training import Training, assert_same
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.sharded_save import save_sharded, save_sharded_async
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError
from tests.checkpoints.test_dcp import Code, change_metadata


def trained(kind="fp32", steps=2):
    training = Training("mxfp8", None, kind=kind)
    training.train(steps)
    return training


@pytest.mark.parametrize("kind", ["fp32", "bf16", "held"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "scheduled"])
def test_torch_loads_what_was_saved(tmp_path, kind, scheduled):
    """Weights, moments, steps and options, of which no key is missing, also under a schedule of torch."""
    one = trained(kind)
    saved = content(one.model, one.optimizer)
    saving = save_sharded_async(one.model, one.optimizer, tmp_path / "async")
    folders = (one.save(tmp_path / "step-2"), saving.result())
    one.train(1)
    for folder in folders:
        assert_same(Plain(scheduled=scheduled).load(folder).content(), saved)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "held"])
def test_what_torch_saved_is_loaded_with_its_options(tmp_path, kind):
    one = Plain(lr=3e-3, betas=(0.7, 0.8), eps=1e-6, foreach=True).train(2)
    other = Training("mxfp8", None, seed=3, kind=kind)
    assert load_sharded(other.model, other.optimizer, one.save(tmp_path / "step-2")) == {}
    assert_same(content(other.model, other.optimizer), one.content())
    assert all(type(group["betas"]) is tuple for group in other.optimizer.param_groups)
    assert all(group["foreach"] is None for group in other.optimizer.param_groups)  # which the machine says


@pytest.mark.parametrize("theirs", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("own", [1e-3, torch.tensor(1e-3)], ids=["into a number", "into a tensor"])
def test_a_rate_in_a_tensor(tmp_path, theirs, own):
    """Is loaded into a rate of either kind; what is saved is of the kind that the optimizer has."""
    folder = Plain(lr=theirs).train(1).save(tmp_path / "a")
    other = Plain(lr=own)
    load_sharded(other.model, other.optimizer, folder)
    rates = [group["lr"] for group in other.optimizer.param_groups]
    assert rates == [0.25, 0.25] and all(type(rate) is type(own) for rate in rates)
    again = Plain(lr=own).load(save_sharded(other.model, other.optimizer, tmp_path / "b"))
    assert_same(again.content(), other.content())


def test_two_ranks_of_torch(tmp_path):
    run_ranks(2, to_and_fro, tmp_path)
    one = Training("mxfp8", None, kind="fp32").load(tmp_path / "step-2")
    assert_same(Plain().load(tmp_path / "step-2").content(), content(one.model, one.optimizer))


def test_a_folder_that_has_options_in_the_text_alone(tmp_path):
    """As all were written before: load_sharded goes on with them."""
    one = trained()
    folder = one.save(tmp_path / "step-2")

    def drop(metadata):
        entries = metadata.state_dict_metadata
        objects = [name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]
        assert objects and all(name.startswith("optimizer.param_groups.") for name in objects)
        for name in objects:
            del entries[name], metadata.planner_data[name]
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn in entries}

    change_metadata(folder, drop)
    assert_same(Training("mxfp8", None, seed=3).load(folder).content(), one.content())


def test_an_option_that_is_code_runs_not(tmp_path):
    """The optimizer keeps its own, and says so."""
    one = Plain(lr=3e-3, betas=(0.7, 0.8)).train(1)
    state = one.state()
    for name, _ in one.model.named_parameters():
        state["optimizer"][f"param_groups.{name}.lr"] = Code(tmp_path / "made")
    folder = save(state, tmp_path / "a")
    other = Plain(lr=1e-2)
    with pytest.warns(UserWarning, match=r"optimizer\.param_groups\.0\.weight\.lr are no number") as told:
        load_sharded(other.model, other.optimizer, folder)
    assert not any("weights_only" in str(warning.message) for warning in told)
    assert [(group["lr"], group["betas"]) for group in other.optimizer.param_groups] == [(1e-2, (0.7, 0.8))] * 2
    assert not (tmp_path / "made").exists()


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def trained(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        self.head(self.embedding(torch.arange(8))).square().sum().backward()
        optimizer.step()
        return self, optimizer


def test_tied_weights(tmp_path):
    """torch has them under each of their names; what inspects and exports a folder of hqsweep has them once."""
    one, optimizer = Tied().trained()
    own = inspect_checkpoint(save_sharded(one, optimizer, tmp_path / "own"))
    assert (list(own.tensors), own.parameters) == (["embedding.weight"], 32)
    assert load_checkpoint(own, Tied()).missing == ("head.weight",)
    for folder in (save_sharded(one, optimizer, tmp_path / "a"), save(state_of(one, optimizer), tmp_path / "b")):
        for read in (load, load_sharded):
            other, its = Tied().trained()
            read(other, its, folder)
            assert_same(content(other, its), content(one, optimizer))
            assert other.head.weight is other.embedding.weight


def test_a_model_without_ties_is_none_with_them(tmp_path):
    one, optimizer = Tied().trained()
    state = state_of(one, optimizer) | {"head.weight": torch.zeros(8, 4)}
    with pytest.raises(UserError, match=r"ties head\.weight and embedding\.weight, which differ there"):
        load_sharded(*Tied().trained(), save(state, tmp_path / "a"))
