"""The exported weights of a run are those that it trained, whatever its linears hold."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.checkpoints.tiny_models import equal, tiny

from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.config.train import ParallelConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.parallel.mesh import Ranks
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.quant.serialize import load_safetensors
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.factories import Importer
from hqsweep.sweep.export import export_folder, export_run
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.train import data
from hqsweep.train.checkpoint import read_state, save_checkpoint
from hqsweep.train.loop import Trainer
from hqsweep.train.model import build_model

pytestmark = pytest.mark.slow


def config(*, fork: dict | None = None, steps: int = 3, **model) -> ConvergenceConfig:
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1,
            "recipe": {"name": "r", "linear": dict.fromkeys(("input", "weight", "grad_output"), "fp8_delayed")},
            "model": {"dim": 32, "layers": 1, "heads": 2, **model},
            "data": {"source": "markov", "markov": {"length": 20000}}, "stats": {"every": 0},
            "train": {"steps": steps, "batch": 2, "context": 16, "eval_batches": 1, "device": "cpu", "lr": 1e-2},
            **({"fork": fork} if fork else {}),
        }
    )  # fmt: skip


def trained(cfg: ConvergenceConfig, folder: Path) -> RunDir:
    """A run that was trained to its end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    convergence.run(cfg, ListSink(), folder)
    return RunDir(folder)


KINDS = {
    "plain": {}, "tied": {"tied": True}, "held": {"quantized_weights": True}, "experts": {"experts": 2, "top_k": 1},
    "held experts": {"experts": 2, "top_k": 1, "quantized_weights": True},
}  # fmt: skip


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS)
def test_the_weights_are_those_that_were_trained(model: dict, tmp_path: Path) -> None:
    cfg = config(**model)
    file, step = export_run(trained(cfg, tmp_path / "t/run"), tmp_path / "out")
    assert (file, step) == (tmp_path / "out/model.safetensors", 3)
    trainer = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))
    for _ in trainer.steps():
        pass
    masters = {name: trainer.optimizer.master_param(p) for name, p in trainer.model.named_parameters()}
    plain = build_model(config(**(model | {"quantized_weights": False})), 16, cfg.recipe.build())
    load_checkpoint(file, plain)
    assert all(torch.equal(p, masters[name]) for name, p in plain.named_parameters())


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    run = trained(config(fork={"at": [1, 2], "steps": 1, "decay": 1, "warmup": 0}, steps=2), tmp_path / "t/run")
    assert export_run(run, tmp_path / "one.safetensors", 1) == (tmp_path / "one.safetensors", 1)
    with pytest.raises(UserError, match="it has no checkpoint of step 7; it has those of 1, 2"):
        export_run(run, tmp_path / "out", 7)
    path = run.checkpoint / "step_2.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"step_2\.pt: it has \d+ bytes, and \d+ were written, so it is not exported"):
        export_run(run, tmp_path / "out")
    for file in run.checkpoint.iterdir():
        file.unlink()
    with pytest.raises(UserError, match="it has kept no checkpoint, so there is nothing to export"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fork_keeps_no_state(tmp_path: Path) -> None:
    cfg = config(fork={"at": [1], "steps": 1, "decay": 1, "warmup": 0, "trunk": "the_trunk"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    with pytest.raises(UserError, match="a fork keeps no state of its end; its trunk the_trunk has that of its"):
        export_run(RunDir(tmp_path / "run"), tmp_path / "out")


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_leaves_as_a_folder(model_type: str, tied: bool, tmp_path: Path) -> None:
    """With the tokenizer that lies beside its config."""
    from transformers import AutoModelForCausalLM

    model = tiny(model_type, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").write_text("{}")
    run = trained(
        parse(config().model_dump() | {"model": {"kind": "hf", "path": str(tmp_path / "m")}}), tmp_path / "t/r"
    )
    assert export_run(run, tmp_path / "out") == (tmp_path / "out", 3)
    state = read_state(run.checkpoint / "step_3.pt", torch.device("cpu"))["model"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    assert not equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    tiny(model_type, hidden_size=48).config.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=r"config.json' is of another model than the run trained; put the one"):
        export_run(run, tmp_path / "more")


def test_a_model_from_a_function_leaves_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the user's is imported for it."""
    (tmp_path / "my_models.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    section = {"_target_": "my_models.build", "width": 32}
    run = trained(parse(config().model_dump() | {"model": section}, Importer(print)), tmp_path / "t/r")
    sys.modules.pop("my_models")
    (tmp_path / "my_models.py").unlink()
    file, _ = export_run(run, tmp_path / "out")
    state = read_state(run.checkpoint / "step_3.pt", torch.device("cpu"))["model"]
    tensors = load_file(file)
    assert set(tensors) == set(state) - {"head.weight"}
    assert all(torch.equal(tensors[name], state[name]) for name in tensors)


FACTORY = """
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(16, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(F.relu(self.middle(self.embedding(tokens))))


def build(width):
    return Model(width)
"""


@pytest.mark.parametrize("model", [KINDS["tied"], KINDS["experts"]], ids=["tied", "experts"])
def test_the_weights_that_ranks_have_written(model: dict, tmp_path: Path) -> None:
    """The folder is as ranks write it, and read from a run and by itself."""
    cfg = config(**model)
    run = trained(cfg, tmp_path / "t/run")
    trainer = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))
    for _ in trainer.steps():
        pass
    file, _ = export_run(run, tmp_path / "one")
    trainer.ranks = Ranks(dims=ParallelConfig(dp_shard=2), mesh=None, device=torch.device("cpu"))
    save_checkpoint(trainer, run.checkpoint)
    (run.checkpoint / "step_3.pt").unlink()
    assert export_run(run, tmp_path / "ranks") == (tmp_path / "ranks/model.safetensors", 3)
    assert (tmp_path / "ranks/model.safetensors").read_bytes() == file.read_bytes()
    plain, every = load_file(file), load_file(export_folder(run.checkpoint / "step_3", tmp_path / "folder"))
    assert plain.keys() == every.keys() and all(torch.equal(plain[name], every[name]) for name in plain)
    (run.checkpoint / "step_3/.metadata").unlink()
    with pytest.raises(Damaged, match="so it is not exported"):
        export_run(run, tmp_path / "again")


@pytest.mark.parametrize("model", [{}, {"experts": 2, "top_k": 1}, {"quantized_weights": True}], ids=str)
@pytest.mark.parametrize("grid", ["mxfp4", "mxfp6_e2m3", "nvfp4"])
def test_projected_weights_are_written_in_their_grid_and_read_back_equal(grid, model: dict, tmp_path: Path) -> None:
    """They have the codes of the masters in bfloat16, each expert by itself. Loaded, they are their values."""
    projected = HybridQuantizer.parse(f"project({grid}) > mxfp8")
    recipe = {"name": "r", "linear": {"input": "mxfp8", "weight": str(projected), "grad_output": "mxfp8"}}
    cfg = parse(config(**model).model_dump() | {"recipe": recipe})
    run = trained(cfg, tmp_path / "t/run")
    masters = load_safetensors(export_run(run, tmp_path / "plain.safetensors")[0])
    file, _ = export_run(run, tmp_path / "grid.safetensors", grid=True)
    read = load_safetensors(file)
    quantized = {name for name, value in read.items() if isinstance(value, HybridQuantizedTensor)}
    assert quantized == {n for n in masters if n.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight"))}
    for name in quantized:
        assert str(read[name].quantizer) == grid and read[name].metadata.directions == ("rowwise",)
        shape = (-1, *read[name].shape[-2:])
        for master, values in zip(masters[name].view(shape), read[name].dequantize().view(shape), strict=True):
            codes = projected.codes(master.bfloat16())
            assert torch.equal(values, codes.dequantize(torch.float32)) and not torch.equal(values, master)
    plain = build_model(config(**(model | {"quantized_weights": False})), 16, cfg.recipe.build())
    load_checkpoint(file, plain)
    for name, own in plain.named_parameters():
        assert torch.equal(own, read[name].dequantize() if name in quantized else masters[name])


def test_a_run_without_projected_weights_has_no_grid(tmp_path: Path) -> None:
    run = trained(config(), tmp_path / "t/run")
    with pytest.raises(UserError, match=r"there is no projected weight, as in recipe\.linear\.weight='project"):
        export_run(run, tmp_path / "out", grid=True)
    assert not (tmp_path / "out").exists()
