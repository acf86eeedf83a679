"""What each rank does in tests of trainings over several ranks."""

import os
from pathlib import Path
from unittest import mock

import torch
from support.parallel.fsdp2_wire import Counting
from support.ranks import DEVICE
from torch.utils._pytree import tree_map_only

from hqsweep.config.job import parse
from hqsweep.jobs.isolation import make_deterministic
from hqsweep.parallel import fsdp_exchanges
from hqsweep.parallel.mesh import Ranks, build_mesh
from hqsweep.parallel.shards.fsdp_state import groups_of
from hqsweep.train import data
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer


def config(linear, *, model=None, stats=None, **train):
    """A small training without checkpoints. linear: those of the recipe, or several of its keys."""
    recipe = linear if isinstance(linear, dict) and "linear" in linear else {"linear": linear}
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 3, "recipe": {"name": "r", **recipe},
            "model": {"dim": 64, "layers": 2, "heads": 2, **(model or {})}, "stats": {"every": 2, **(stats or {})},
            "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 2, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 2, "log_every": 1,
                      "device": os.environ.get(DEVICE, "cpu"), **train},
        }
    )  # fmt: skip


def trainer(cfg):
    """In this process alone, or as one of the ranks of the process group that is there."""
    dims, ranks, device = cfg.train.parallel, None, torch.device(cfg.train.device)
    if device.type == "cuda":
        make_deterministic()
        device = torch.device("cuda", torch.cuda.current_device())
    if dims.world > 1:
        ranks = Ranks(dims=dims, mesh=build_mesh(dims, device.type), device=device)
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), device, ranks)


def train(cfg):
    """(metrics of each step, statistics of each step, the state of the model at the end)."""
    run = trainer(cfg)
    steps = list(run.steps())
    return [step.metrics for step in steps], [step.stats for step in steps], on_cpu(run.state())


def on_cpu(tree):
    """The same with its tensors on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), tree)


def train_all(rank: int, cases: list, counted: list) -> tuple[list, list]:
    """train() of each configuration that a case says, and gathers() of those of others."""
    trained = [train(config(linear, **changes)) for linear, changes in cases]
    return trained, [gathers(config(linear, **changes)) for linear, changes in counted]


def gathers(cfg) -> list[tuple[int, int]]:
    """How often torch gathers the weights of the first layer in each step, and how often any weight is gathered on the
    spot, as a product reads it."""
    run = trainer(cfg)
    [group] = groups_of(run.model.layers[0])
    counter, on_the_spot, counts = Counting(group._all_gather_comm), [], []
    run.model.layers[0].set_custom_all_gather(counter)
    gather = fsdp_exchanges.all_gather
    noted = lambda *tensors, **options: on_the_spot.append(tensors) or gather(*tensors, **options)  # noqa: E731
    with mock.patch.object(fsdp_exchanges, "all_gather", noted):
        for _ in run.steps():
            counts.append((len(counter.sent), len(on_the_spot)))
            counter.sent.clear()
            on_the_spot.clear()
    return counts


def resume(changes: dict, folder: Path) -> tuple:
    """The last step's metrics of a training, and of one that goes on from its checkpoint before that step."""
    cfg = config("mxfp8", steps=3, **changes)
    through = trainer(cfg)
    steps = through.steps()
    next(steps), next(steps)
    save_checkpoint(through, folder)
    last = next(steps)
    again = trainer(cfg)
    again.ranks.barrier()
    assert load_checkpoint(again, folder) and again.step == 2
    return last.metrics, next(again.steps()).metrics


def resume_all(rank: int, folder: Path, cases: list) -> list:
    """resume() of each case."""
    return [resume(changes, folder / str(index)) for index, changes in enumerate(cases)]
