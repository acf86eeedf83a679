"""A training over ranks, one of which meets a NaN: run in each of several ranks."""

import torch
from support.parallel.training_ranks import config, trainer

from hqsweep.parallel.wire.local import local

SPOILED = "layers.0.mlp.fc1.weight"


def spoil(run, step: int):
    """The steps of a training, in the given one of which a weight has a NaN, on the way to its product alone."""
    weight = local(dict(run.model.named_parameters())[SPOILED]).detach().view(-1)
    steps = run.steps()
    while run.step < run.config.train.steps:
        before = weight[3].clone()
        if run.step + 1 == step:
            weight[3] = torch.nan
        done = next(steps)
        if done.step == step:
            weight[3] = before
        yield done


def spoil_one(rank: int, cases: list) -> list:
    """What each training has met, where the NaN is on rank 1 alone, and the metrics about it at each step."""
    met = []
    for linear, changes in cases:
        run = trainer(config(linear, **changes, steps=4, log_every=2, eval_every=9))
        rows = [done.metrics for done in spoil(run, 3 if rank == 1 else 0)]
        seen = [{name: value for name, value in row.items() if "nonfinite" in name} for row in rows]
        met.append((run.nonfinite.manifest(), seen))
    return met
