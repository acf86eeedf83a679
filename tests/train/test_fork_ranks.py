"""Fork studies over two ranks: the trunk, its forks and the null arm have the losses of one process."""

import hashlib

import pytest
import torch
from cases import DELAYED_IN_PARTS, LINEARS
from safetensors.torch import save_file
from support.parallel.fork_ranks import AT, config, ranked, rows, run, study
from support.ranks import run_ranks

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.train.model import GPT
from hqsweep.train.record import check_recorded, checkpoints, is_point

pytestmark = pytest.mark.slow

NVFP4 = LINEARS["nvfp4"]
SR_WEIGHTS = {"input": "bf16", "weight": "nvfp4|nvfp4+sr@rowwise_dequantized", "grad_output": "bf16"}
DELAYED = DELAYED_IN_PARTS
HELD_DELAYED = {"input": "bf16", "weight": "fp8_delayed|fp8_delayed+e5m2", "grad_output": "bf16"}
EXPERTS = {"experts": 2, "top_k": 1}
TWO, COPIES = {"dp_shard": 2}, {"dp_replicate": 2}
CASES = {
    "an arm": ({"of_fork": {"linear": NVFP4}, "killed": True}, TWO),
    "the null arm, delayed": ({"linear": DELAYED, "of_fork": {"noise": 0.01}}, TWO),
    "held": ({"linear": "mxfp8", "quantized": True, "of_fork": {"noise": 0.01}}, TWO),
    "held with random bits": ({"quantized": True, "of_fork": {"linear": SR_WEIGHTS}}, TWO),
    "held delayed": ({"quantized": True, "of_fork": {"linear": HELD_DELAYED}, "killed": True}, TWO),
    "held delayed that goes on": ({"linear": HELD_DELAYED, "quantized": True}, TWO),
    "held experts": (EXPERTS | {"quantized": True, "of_fork": {"linear": "mxfp8"}}, TWO),
    "experts of ranks": (EXPERTS | {"of_fork": {"linear": "mxfp8", "noise": 0.01}}, {"dp_shard": 2, "ep": 2}),
    "stages": (
        {"layers": 2, "tied": True, "quantized": True, "of_fork": {"linear": "mxfp8", "noise": 0.01}},
        {"pp": 2},
    ),
    "copies": ({"of_fork": {"linear": "mxfp8", "noise": 0.01}}, COPIES),
}
"""Name -> the options of both runs and of one, whether they are interrupted once, and the ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forks")


@pytest.fixture(scope="module")
def source(folder):
    """What ranks are to begin from: a trunk of one process, and weights of another program."""
    run(config(trunk=None, quantized=True, layers=2), folder / "one" / "trunk")
    state = folder / "one" / "trunk" / "checkpoint" / f"step_{AT}.pt"
    plain, path = config("mxfp8", trunk=None), folder / "model.safetensors"
    model = GPT(plain.model, 16, plain.recipe.build(), torch.float32)
    save_file({name: 0.02 * torch.randn(weight.shape) for name, weight in model.state_dict().items()}, path)
    fork = {"trunk": str(state), "fork": {"trunk_hash": hashlib.sha256(state.read_bytes()).hexdigest()}}
    fork |= {"linear": "mxfp8", "quantized": True, "noise": 0.01, "layers": 2}
    return {
        "fork": fork,
        "source": {"source": str(path), "source_hash": inspect_checkpoint(path).sha256},
    }


@pytest.fixture(scope="module")
def results(folder, source):
    """What ranks return, for which they are launched once."""
    return run_ranks(2, ranked, folder, list(CASES.values()), source)


@pytest.mark.parametrize("name", CASES)
def test_a_fork_study_over_ranks_has_the_losses_of_one_process(results, name, tmp_path):
    (case, parallel), sinks = CASES[name], results[0]["studies"][list(CASES).index(name)]
    for own, expected in zip(sinks, study(tmp_path, case, None), strict=True):
        if "ep" in parallel:  # whose gradients of experts are one sum over the tokens of all ranks
            assert [row.pop("value") for row in own] == pytest.approx([row.pop("value") for row in expected], rel=5e-3)
        assert own == expected


def test_a_point_is_a_folder_whose_record_names_its_run(results, folder):
    for index in range(len(CASES)):
        points = checkpoints(folder / str(index) / "trunk" / "checkpoint")
        assert list(points) == [2, AT] and points[AT].is_dir() and is_point(points[AT]) and not is_point(points[2])
        assert check_recorded(points[AT]).point
        assert not (folder / str(index) / "fork" / "checkpoint").exists()


def test_one_process_and_ranks_fork_what_the_other_wrote(results, folder, source, tmp_path):
    """A state of one process on two ranks, and the folder of two ranks in one process."""
    assert results[0]["from a file"] == rows(run(config(**source["fork"]), tmp_path / "from_file"))
    path = folder / str(list(CASES).index("held")) / "trunk" / "checkpoint" / f"step_{AT}"
    linear = {"linear": "mxfp8", "quantized": True, "noise": 0.01}
    outside = {"trunk": str(path), "fork": {"trunk_hash": check_recorded(path).sha256}}
    expected = results[0]["studies"][list(CASES).index("held")][1]
    assert rows(run(config(**linear, **outside), tmp_path / "outside")) == expected


def test_stages_refuse_the_state_of_one_process_with_one_sentence(results):
    sentence = (
        "fork.trunk: it is the state of one process, and ranks with layers of their own (train.parallel.pp) go on from"
        " a folder that ranks wrote; give another, or pp=1"
    )
    assert [each["refused"] for each in results] == [sentence] * 2


def test_trunks_over_ranks_begin_from_checkpoints_of_others(results, source, tmp_path):
    assert results[0]["source"] == rows(run(config(trunk=None, fork=source["source"]), tmp_path))


def test_a_trunk_over_ranks_makes_up_for_points_that_it_has_passed(results, folder):
    points = checkpoints(folder / "more" / "checkpoint")
    assert list(points) == [2, 4] and all(map(is_point, points.values()))
