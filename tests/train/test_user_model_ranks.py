"""Users' own models over two ranks against the training in one process with as many microbatches."""

from pathlib import Path

import pytest
import torch
from cases import DELAYED_IN_PARTS, LINEARS
from safetensors.torch import load_file
from support.models.tiny import tiny
from support.parallel.fork_ranks import study
from support.parallel.user_ranks import Normed, config, everything, train
from support.ranks import run_ranks

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.errors import UserError
from hqsweep.models.build import check_ranks

pytestmark = pytest.mark.slow

NVFP4 = LINEARS["nvfp4"]
DELAYED = LINEARS["fp8_delayed"]
SHARDED, COPIES = {"dp_shard": 2}, {"dp_replicate": 2}
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "dropping": ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    "qwen3": ("qwen3", {"intermediate_size": 96, "head_dim": 16}),
    "mixtral": ("mixtral", {"output_router_logits": True}),
}
CASES = {
    "llama": (NVFP4, SHARDED, {"recompute": "layer"}),
    "dropping": ("mxfp8", SHARDED, {"offload": True}),
    "qwen3": (DELAYED, COPIES),
    "mixtral": ("mxfp8", SHARDED),
    "Blocks": ("mxfp8", SHARDED),
    "Calling": ("mxfp8", SHARDED, {"dtype": "fp32"}),
    "held llama": (NVFP4, SHARDED, {"recompute": "layer"}, True),
    "held qwen3": (DELAYED, COPIES, {}, True),
    "held mixtral": (DELAYED, SHARDED, {}, True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Configs of models of Hugging Face."""
    path = tmp_path_factory.mktemp("models")
    for name, (kind, options) in MODELS.items():
        tiny(kind, **options).config.save_pretrained(path / name)
    return path


def cases(folder: Path) -> list[tuple]:
    folders = {name: folder / name.removeprefix("held ") for name in CASES}
    return [(folders[name] if folders[name].name in MODELS else name, *case) for name, case in CASES.items()]


@pytest.fixture(scope="module")
def forked(folder):
    """A fork study of a Hugging Face model: a trunk that begins from its weights, and an arm."""
    path = folder / "weights"
    tiny("llama", num_hidden_layers=1, tie_word_embeddings=True).save_pretrained(path)
    begun = {"source": str(path), "source_hash": inspect_checkpoint(path).sha256}
    arm = {"linear": DELAYED_IN_PARTS, "noise": 0.01}
    return {"kind": "hf", "path": str(path), "of_fork": arm, "of_trunk": {"fork": begun}}


@pytest.fixture(scope="module")
def both(folder, forked):
    """What both ranks return, for which they are launched once, as each takes seconds to import transformers."""
    return run_ranks(2, everything, folder / "ranks", cases(folder), forked)


@pytest.fixture(scope="module")
def results(both):
    """What both ranks return of the trainings."""
    return [trainings for trainings, _ in both]


@pytest.mark.feature("H11")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_two_microbatches(results, folder, name, tmp_path):
    """Losses and statistics to the byte, and the weights that are exported at the end; held weights are compared with
    the training of plain ones, and what is exported of them are values of codes."""
    index = list(CASES).index(name)
    model, linear, _, *more = cases(folder)[index]
    held = name.startswith("held ")
    metrics, stats, _ = train(config(model, linear, None, *more[:1]), tmp_path)
    for theirs, *_ in (each[index] for each in results):
        for step, expected in zip(theirs, metrics, strict=True):
            assert step.pop("grad_norm") == pytest.approx(expected["grad_norm"], rel=1e-6)
            assert step == {name: value for name, value in expected.items() if name != "grad_norm"}
    assert results[0][index][1] == stats and any(stats)
    folders = folder / "ranks" / str(index), tmp_path
    ours, theirs = (load_file(inspect_checkpoint(path / "out").files[0]) for path in folders)
    assert ours.keys() == theirs.keys()
    different = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert different == {name for name in ours if held and ("proj" in name or "experts" in name)}


def test_weights_of_linears_travel_in_the_dtype_of_autocast(results):
    """Others, such as tables and norms, travel as they are."""
    linears = ("proj.weight", "c_attn.weight", "c_fc.weight", "blocks.0.0.weight", "blocks.1.0.weight")
    for name, dtypes in zip(CASES, (case[2] for case in results[0]), strict=True):
        narrow = {weight for weight, dtype in dtypes.items() if dtype == torch.bfloat16}
        others = name == "Calling" or name.startswith("held ")
        assert narrow == (set() if others else {weight for weight in dtypes if weight.endswith(linears)})
        assert narrow or others or name == "qwen3"  # which has copies, and gathers nothing


def test_a_fork_study_of_a_hugging_face_model_has_the_losses_of_one_process(both, forked, tmp_path):
    assert both[0][1] == study(tmp_path, forked, None)


def test_what_ranks_would_compute_otherwise_is_refused():
    with pytest.raises(UserError, match=r"train.parallel: norm is a BatchNorm1d, whose statistics"):
        check_ranks(Normed())
    model = Normed().blocks
    model.gain = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match=r"train.parallel: gain is a number.*shape \[1\]"):
        check_ranks(model)
    with pytest.raises(UserError, match=r"train.parallel.tp: 2, but ranks of a model of your own.*give tp=1"):
        config("Blocks", "mxfp8", {"tp": 2})
