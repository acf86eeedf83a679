"""train.optimizer and train.moments: the GPT learns under each, and a run goes on from its checkpoint."""

import copy

import pytest
import torch

from hqsweep.config.job import parse
from hqsweep.sweep.grid.compose import expand
from hqsweep.train import data
from hqsweep.train.loop import Trainer

WORDS = ["data=markov", "data.markov.length=20000", "model.dim=32", "model.layers=1", "model.heads=1", "track=none",
         "train.steps=30", "train.batch=8", "train.context=32", "train.device=cpu", "train.lr=0.01", "recipe=mxfp8",
         "stats.every=0", "train.log_every=5", "train.warmup=0.1"]  # fmt: skip


def trainer(*words: str) -> Trainer:
    (point,) = expand("convergence", [*WORDS, *words]).points
    config = parse(point.config)
    return Trainer(config, data.load(config.data), config.recipe.build(), torch.device("cpu"))


@pytest.mark.parametrize("words", [["train.optimizer=sgd"], ["train.optimizer=muon"],
                                   ["train.moments=bf16"], ["train.moments=fp8"]])  # fmt: skip
def test_the_gpt_learns_and_goes_on_from_its_state(words):
    first = trainer(*words)
    early = [step.loss for step in first.steps(15)]
    state = copy.deepcopy(first.state())
    losses = [step.loss for step in first.steps()]
    second = trainer(*words)
    second.load_state(state)
    assert [step.loss for step in second.steps()] == losses and losses[-1] < early[4]


def test_muon_takes_the_matrices_of_layers_alone():
    groups = trainer("train.optimizer=muon").optimizer.param_groups
    assert [group["rule"] for group in groups] == ["muon", "adamw", "adamw"]
    assert all(p.ndim == 2 for p in groups[0]["params"]) and len(groups[0]["params"]) == 4
