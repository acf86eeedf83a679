"""Fork studies in this process, one run after another: a trunk's states, and the losses of its forks."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.rows import Row
from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.train import data
from hqsweep.train.loop import Trainer
from hqsweep.train.model import GPT


def trainer(dataset: data.Dataset, config: Row) -> Trainer:
    checked: ConvergenceConfig = parse(config)
    return Trainer(checked, dataset, checked.recipe.build(), torch.device("cpu"))


def trunk_states(dataset: data.Dataset, config: Row, points: Sequence[int], fork: Row) -> list[Row]:
    """The whole state of the trunk at every point. `fork`: its steps, decay and warmup."""
    trunk = trainer(dataset, _without_rows(config, max(points)) | {"fork": fork | {"at": list(points)}})
    return [copy.deepcopy(trunk.state()) for step in trunk.steps() if step.step in points]


def decay_loss(
    dataset: data.Dataset, config: Row, state: Row, fork: Row, plant: Callable[[GPT], None] | None = None
) -> float:
    """The mean training loss in nats of a fork over the steps in which its learning rate falls.

    `fork`: its steps, decay and warmup, and the noise of a null arm; `plant` changes the model before the first step.
    """
    last = state["step"] + fork["steps"] + fork["decay"]
    section = fork | {"at": [state["step"]], "trunk": "trunk"}
    forked = trainer(dataset, _without_rows(config, last) | {"fork": section})
    forked.fork_from(copy.deepcopy(state))
    if plant:
        plant(forked.model)
    *_, end = forked.steps()
    return end.metrics["train_loss"]


def percent(losses: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> np.ndarray:
    """Gaps [trunks, points] in % of the baseline's loss at the same fork."""
    return 100 * (np.divide(losses, baseline) - 1)


def _without_rows(config: Row, steps: int) -> Row:
    """The config for so many steps, which logs and evaluates at the end alone, and where a fork's rate begins to
    fall."""
    rows = {"log_every": 10**6, "eval_every": 10**6, "eval_batches": 1}
    return config | {"train": config["train"] | rows | {"steps": steps}}
