"""What each rank does in tests of users' own models over several ranks."""

from pathlib import Path

import torch
from support.parallel.fork_ranks import study
from support.parallel.training_ranks import trainer
from torch import nn

from hqsweep.checkpoints.weights import save_model
from hqsweep.config.job import parse
from hqsweep.recipe.factories import find_factory
from hqsweep.torch_private import fsdp_parameters
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint


class Blocks(nn.Module):
    """A model of two blocks whose head is its embedding, with dropout and a buffer; its loss is a method of its own
    that calls no forward of it."""

    def __init__(self, width: int = 32, vocab: int = 16) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.table.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(2))
        self.register_buffer("scale", torch.tensor([0.5]))

    def hidden(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + self.scale * torch.relu(block(x))
        return x

    def forward(self, tokens):
        return self.head(self.hidden(tokens))

    def loss(self, tokens, targets):
        x = self.head(self.hidden(tokens)).float()
        return nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten()), 0.01 * x.square().mean()


class Calling(Blocks):
    """Its loss is of its forward."""

    def loss(self, tokens, targets):
        return nn.functional.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


class Normed(Blocks):
    """With statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)


def config(model, linear, parallel, train=None, held=False):
    """A small training of the model in a folder, or of a class of this module by its name; nothing is clipped, as the
    norm of gradients is summed by parts. held: whether weights are held quantized."""
    section = {"_target_": f"{__name__}.{model}"}
    if isinstance(model, Path):
        section = {"kind": "hf", "path": str(model), "pretrained": False}
    section["quantized_weights"] = held
    over = {"parallel": parallel} if parallel else {"microbatches": 2}
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 3, "recipe": {"name": "r", "linear": linear}, "model": section,
            "stats": {"every": 2}, "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 2, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 2, "log_every": 1,
                      "device": "cpu", "lr": 1e-2, "clip": 100.0, **over, **(train or {})},
        },
        find_factory,
    )  # fmt: skip


def train(cfg, folder: Path | None = None) -> tuple:
    """(metrics, statistics) of a training, which goes on from its checkpoint once where there is a folder."""
    run = trainer(cfg)
    steps = list(run.steps(last=1))
    if folder is not None:
        save_checkpoint(run, folder / "checkpoint")
        run = trainer(cfg)
        assert load_checkpoint(run, folder / "checkpoint") and run.step == 1
    steps += list(run.steps())
    if folder is not None:
        save_model(run.model, folder / "out")
    return [step.metrics for step in steps], [step.stats for step in steps], travelling(run.model)


def travelling(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtype in which each weight under fully_shard is gathered."""
    units = fsdp_parameters(model)
    return {unit._param_fqn: unit.all_gather_outputs[0].dtype for unit in units if unit.all_gather_outputs}


def everything(rank: int, folder: Path, cases: list, forked: dict) -> tuple:
    """train() of each case, and the rows of a fork study over both ranks."""
    trainings = [train(config(*case), folder / str(index)) for index, case in enumerate(cases)]
    return trainings, study(folder / "forked", forked, {"dp_shard": 2})
