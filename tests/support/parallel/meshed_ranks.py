"""What each rank does in tests of trainings over several axes of a mesh."""

from pathlib import Path

import torch
from support.parallel.training_ranks import config as with_batches
from support.parallel.training_ranks import on_cpu, trainer

from hqsweep.checkpoints.sharded_state import delayed_tensors, parameters_of
from hqsweep.optim import MASTER
from hqsweep.parallel.wire.local import local, whole_tensor
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint

EXPERTS = {"experts": 8, "first_moe_layer": 1, "tied": True}
"""In the last layer alone, so that what reaches the experts in a first step is that of any number of ranks."""


def config(linear, **changes):
    """A small training with one batch of evaluation, and no statistics unless they are asked for."""
    return with_batches(linear, eval_batches=1, **{"stats": {"every": 0}} | changes)


def content(run, of_all=whole_tensor) -> dict[str, torch.Tensor]:
    """Whole weights (but held ones, which are made of their masters), masters and moments, or with of_all=local this
    rank's parts of them, and the states of delayed scaling that this rank writes."""
    tensors = {name: value.clone() for name, value in delayed_tensors(run.model).items()}
    for name, p in parameters_of(run.model).items():
        state = {f"{name}.{key}": value for key, value in run.optimizer.state[p].items()}
        if not isinstance(local(p), HybridQuantizedTensor):
            state |= {name: p.detach(), f"{name}.{MASTER}": run.optimizer.master_param(p).detach()}
        tensors |= {name: of_all(value).clone() for name, value in state.items()}
    return on_cpu(tensors)


def outcome(linear, **changes) -> tuple:
    """The metrics of each step, and content() after the last."""
    run = trainer(config(linear, **changes))
    metrics = [step.metrics for step in run.steps()]
    return metrics, content(run)


def resumed(folder: Path, linear, **changes) -> tuple:
    """The same of two steps, with this rank's parts, and of the last one after the checkpoint of the first."""
    cfg = config(linear, **changes | {"steps": 2})
    one = trainer(cfg)
    metrics = []
    for step in one.steps():
        metrics.append(step.metrics)
        if step.step == 1:
            save_checkpoint(one, folder)
    two = trainer(cfg)
    assert load_checkpoint(two, folder) and two.step == 1
    again = [step.metrics for step in two.steps()]
    return metrics, content(one, local), again, content(two, local)


SAMPLED = {"stats": {"every": 1, "capture_at": 1}}


def sampled(linear, **changes) -> tuple:
    """Statistics and operands of the first step."""
    step = next(trainer(config(linear, **changes, **SAMPLED)).steps())
    return step.stats, on_cpu(step.captured)


def outcome_and_sampled(linear, **changes) -> tuple:
    """outcome() of one step that is sampled, and sampled()."""
    run = trainer(config(linear, **changes, **SAMPLED))
    [step] = run.steps()
    return ([step.metrics], content(run)), (step.stats, on_cpu(step.captured))


def run(rank: int, folder: Path, cases: list, resumes: list) -> tuple:
    """outcome() of each case, resumed() of others, and sampled() of the first two cases, which have one step."""
    both = [outcome_and_sampled(linear, **changes) for linear, changes in cases[:2]]
    outcomes = [first for first, _ in both] + [outcome(linear, **changes) for linear, changes in cases[2:]]
    again = [resumed(folder / str(i), linear, **changes) for i, (linear, changes) in enumerate(resumes)]
    return outcomes, again, [second for _, second in both]
