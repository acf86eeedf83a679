"""Weights that are held quantized under tensor parallelism and fully_shard at once, against one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cases import SOME, STATELESS
from support.parallel import held_parts
from support.parallel.fsdp2_ranks import differing
from support.ranks import run_ranks

from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.sharded_save import save_sharded
from hqsweep.checkpoints.sharded_state import delayed_tensors
from hqsweep.optim import FusedAdam
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.shared.held import hold_part
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.train.model import GPT

pytestmark = pytest.mark.slow
TEXTS = [*SOME[:-1], *(text for text in STATELESS if "+sr" in text or "+row_scaled" in text)]
"""One format of each scaling, and all that draw bits or scale rows."""


class Trained(NamedTuple):
    """A training of one process after two steps, the first of which the ranks went on from."""

    model: GPT
    optimizer: FusedAdam
    folder: Path
    """With the checkpoint of one process after a step, and that of four ranks after the next."""


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    trained = {}
    for name, recipe in held_parts.RECIPES.items():
        folder, (model, optimizer) = tmp_path_factory.mktemp("held") / name, held_parts.training_of(recipe)
        held_parts.step(model, optimizer, 1)
        save_sharded(model, optimizer, folder / "one")
        held_parts.step(model, optimizer, 2)
        trained[name] = Trained(model, optimizer, folder)
    return trained


@pytest.fixture(scope="module")
def of_four(of_one):
    """What each rank returned: what differs of plain weights, and of held ones, and Steps of each recipe."""
    folders = {name: training.folder for name, training in of_one.items()}
    return list(zip(*run_ranks(4, held_parts.everything, folders, TEXTS), strict=True))


def test_parts_that_fully_shard_cuts_further(of_four):
    assert of_four[0] == ([],) * 4


@pytest.mark.feature("H8", "H20")
def test_held_parts_that_fully_shard_cuts_further_are_those_of_one_process(of_four):
    assert of_four[1] == ([],) * 4


@pytest.mark.feature("H20")
@pytest.mark.parametrize("name", held_parts.RECIPES)
def test_a_step_after_a_checkpoint_of_one_process_has_its_codes(of_one, of_four, name):
    held = {n: p for n, p in of_one[name].model.named_parameters() if isinstance(p, HybridQuantizedTensor)}
    for rank, results in enumerate(of_four[2]):
        parts = results[name].parts
        assert parts.keys() == held.keys()
        for weight, (axis, runs, buffers) in parts.items():
            group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank % 2)
            expected = hold_part(held[weight], Part(group=group, axis=axis, runs=runs))
            assert differing(SimpleNamespace(buffers=buffers), expected) == [], (rank, weight)
        assert {runs for _, runs, _ in parts.values()} == {1, 2, 3}


@pytest.mark.feature("H20")
@pytest.mark.parametrize("name", held_parts.RECIPES)
def test_one_process_goes_on_from_a_checkpoint_of_ranks(of_one, of_four, name):
    """Codes, masters, moments and histories of weights are its own; those of other tensors are of split sums."""
    model, optimizer = held_parts.training_of(held_parts.RECIPES[name])
    load_sharded(model, optimizer, of_one[name].folder / "four")
    whole = dict(of_one[name].model.named_parameters())
    for n, p in model.named_parameters():
        if isinstance(p, HybridQuantizedTensor):
            assert differing(p, whole[n]) == [] and p.metadata.key == whole[n].metadata.key, n
        state, expected = optimizer.state[p], of_one[name].optimizer.state[whole[n]]
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state), n
    histories, expected = (delayed_tensors(each) for each in (model, of_one[name].model))
    compared = [n for n in expected if ".weight_" in n]
    assert all(torch.equal(histories[n], expected[n]) for n in compared) and bool(compared) == (name == "delayed")


def test_codes_alone_are_not_saved(of_four):
    for results in of_four[2]:
        assert results["random"].refusal == (
            "save_sharded: a weight in nvfp4+tensor+sr|nvfp4+sr@rowwise_dequantized without a master, of which ranks of"
            " tp or ep have parts, is not saved as codes; give the optimizer that has its master, or build the model"
            " with quantized_model_init(preserve_high_precision_init_val=True)"
        )
