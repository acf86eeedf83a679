"""Compiled blocks of users' models: which modules they are, that training is the same with them, samples, failures."""

from functools import partial

import pytest
import torch
from cases import LINEARS
from support.models.tiny import tiny
from torch import nn
from torch._dynamo.utils import counters

import hqsweep
from hqsweep.config.job import parse
from hqsweep.jobs.training_report import steps_fields
from hqsweep.models.build import CompiledBlocks, blocks_of
from hqsweep.recipe.factories import find_factory
from hqsweep.train import data
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer

HERE = "tests.train.test_compiled_blocks"


class Block(nn.Module):
    """x + a linear of x; `waits`: it asks the host for a number, which no graph holds, always or in evaluation."""

    def __init__(self, width: int, waits: str = "") -> None:
        super().__init__()
        self.up, self.waits = nn.Linear(width, width), waits

    def forward(self, x):
        waits = self.waits == "always" or (self.waits == "in evaluation" and not self.training)
        scale = x.abs().max().item() if waits else 1.0
        return x + self.up(x) * (0.5 if scale < 0 else 1.0)


class Blocks(nn.Module):
    """A bigram model with two blocks."""

    def __init__(self, width: int = 32, vocab: int = 16, waits: str = "") -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(Block(width, waits), Block(width, waits))
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.out(self.blocks(self.table(tokens)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    tiny("llama").save_pretrained(path)
    return path


def config(linear="mxfp8", *, model=None, schedule=(), every=0, gemm="exact", **train):
    train = {"steps": 4, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 2, "log_every": 1, **train}
    return parse(
        {
            "job": "convergence", "sweep": "t", "data": {"source": "markov", "markov": {"length": 20000}},
            "recipe": {"name": "r", "linear": linear, "gemm": gemm, "schedule": list(schedule)},
            "stats": {"every": every},
            "model": model or {"_target_": f"{HERE}.Blocks"}, "train": {"device": "cpu", "lr": 1e-3, **train},
        },
        find_factory,
    )  # fmt: skip


def hf(folder):
    return {"kind": "hf", "path": str(folder)}


def trainer(cfg, backend=None):
    """A Trainer; with a backend of torch.compile, its blocks are compiled, as on a GPU."""
    t = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device(cfg.train.device))
    if backend:
        t.adapter.compiled = CompiledBlocks(t.model, t.adapter.conversion, backend)
    return t


def test_blocks_are_the_outermost_members_of_lists_that_share_a_class():
    model = tiny("llama")
    hqsweep.convert(model, "mxfp8")
    assert blocks_of(model) == list(model.model.layers)
    mixed = nn.Sequential(Blocks(), nn.Linear(32, 32))
    hqsweep.convert(mixed, "mxfp8")
    assert blocks_of(mixed) == list(mixed[0].blocks)
    assert blocks_of(Blocks()) == []  # nothing computes by a recipe


@pytest.mark.parametrize(("linear", "why"), [("fp8_delayed", "delayed scaling"), ("mxfp8", None)])
def test_delayed_scaling_stays_uncompiled(linear, why):
    t = trainer(config(LINEARS[linear]), "aot_eager")
    assert t.adapter.compiled.on == (why is None) and (why or "") in (t.adapter.compiled.why_not or "")


def test_samples_look_at_the_blocks_as_they_are_and_change_no_bit(capsys):
    counters.clear()
    cfg = config(every=2, microbatches=2)
    plain, compiled = trainer(cfg), trainer(cfg, "aot_eager")
    for own, ours in zip(plain.steps(), compiled.steps(), strict=True):
        assert own.metrics == ours.metrics and own.stats == ours.stats
    unsampled = [done.metrics for done in trainer(config(microbatches=2), "aot_eager").steps()]
    assert unsampled[-1]["val_loss"] == compiled.val_loss and compiled.adapter.compiled.on
    assert "compile: 2 Block by TorchInductor, in " in capsys.readouterr().out and not compiled.adapter.unused()
    assert steps_fields(compiled)["compiled"] == "2 Block by TorchInductor" and "compiled" not in steps_fields(plain)
    assert counters["stats"]["unique_graphs"] <= 8  # training and evaluation, of each microbatch


@pytest.mark.parametrize("waits", ["always", "in evaluation"])
def test_a_block_that_cannot_be_one_graph_runs_as_it_is(waits, capsys):
    cfg = config(model={"_target_": f"{HERE}.Blocks", "waits": waits})
    plain, compiled = trainer(cfg), trainer(cfg, "aot_eager")
    assert [done.metrics for done in plain.steps()] == [done.metrics for done in compiled.steps()]
    assert not compiled.adapter.compiled.on and "compile: nothing, since a trial raised" in capsys.readouterr().out


def test_a_change_of_the_recipe_compiles_anew():
    cfg = config(schedule=[{"at": 2, "linear": "bf16"}])
    plain, compiled = trainer(cfg), trainer(cfg, "aot_eager")
    assert [done.metrics for done in plain.steps()] == [done.metrics for done in compiled.steps()]
    assert compiled.adapter.compiled.on


def check_resumed(build, folder):
    """A Trainer goes on from its checkpoint with the bits of one that was not interrupted."""
    whole, first = build(), build()
    rows = [done.metrics for done in whole.steps()]
    for _ in first.steps(last=2):
        pass
    save_checkpoint(first, folder)
    resumed = build()
    assert load_checkpoint(resumed, folder)
    assert [done.metrics for done in resumed.steps()] == rows[2:] and resumed.adapter.compiled.on
    return rows


@pytest.mark.slow
def test_compiled_blocks_of_hugging_face_repeat_and_resume(folder, tmp_path):
    cfg = config(LINEARS["nvfp4"], model=hf(folder), context=16)
    rows = check_resumed(partial(trainer, cfg, "aot_eager"), tmp_path)
    assert rows == [done.metrics for done in trainer(cfg).steps()]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("linear", "gemm"),
    [("bf16", "exact"), ("mxfp8", "exact"), (LINEARS["nvfp4"], "exact"), ("fp8_current", "native")],
    ids=("bf16", "mxfp8", "nvfp4", "native"),
)
def test_on_a_gpu_a_run_repeats_and_resumes_and_is_near_the_uncompiled_one(linear, gemm, folder, tmp_path):
    options = {"model": hf(folder), "device": "cuda", "dtype": "bf16", "steps": 8, "batch": 8, "context": 64}
    cfg = config(linear, gemm=gemm, **options)
    rows = check_resumed(partial(trainer, cfg), tmp_path)
    assert rows == [done.metrics for done in trainer(cfg).steps()]
    sampled = trainer(config(linear, gemm=gemm, every=3, **options))
    assert rows == [done.metrics for done in sampled.steps()] and sampled.runner.has_graph
    off = trainer(config(linear, gemm=gemm, compile="off", **options))
    assert off.adapter.compiled is None
    for own, ours in zip(off.steps(), rows, strict=True):
        assert ours["train_loss"] == pytest.approx(own.metrics["train_loss"], rel=5e-3)
