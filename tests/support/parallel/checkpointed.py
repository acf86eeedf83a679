"""What each rank does in tests of a run's checkpoints over ranks."""

from pathlib import Path

import torch
from support.parallel.sharded_training import assert_same, whole
from support.parallel.training_ranks import config, on_cpu, trainer

from hqsweep.parallel.wire.local import local
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint


def content(run, of_all=whole) -> dict[str, torch.Tensor]:
    """Weights and moments, of all ranks, or with of_all=local this rank's parts of them."""
    tensors = {name: of_all(value) for name, value in run.model.state_dict().items()}
    for name, p in run.model.named_parameters():
        tensors |= {f"{name}.{key}": of_all(value) for key, value in run.optimizer.state[p].items()}
    return on_cpu(tensors)


def resumed(rank: int, folder: Path, cases: list) -> None:
    """Four steps, with checkpoints after each, and what goes on from those of the second and the third."""
    for index, (linear, changes) in enumerate(cases):
        cfg = config(linear, steps=4, stats={"every": 0}, **changes)
        one, own = trainer(cfg), folder / str(index)
        rows = []
        for done in one.steps():
            rows.append(done.metrics)
            if done.step < 4:
                save_checkpoint(one, own, run="r")
        for before, step in ((None, 3), (3, 2)):
            two = trainer(cfg)
            assert load_checkpoint(two, own, before) and two.step == step
            assert [done.metrics for done in two.steps()] == rows[step:]
            assert_same(content(two, local), content(one, local))
