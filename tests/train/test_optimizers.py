"""train.optimizer and train.moments: a model learns under each, and a run goes on from its checkpoint."""

import copy

import pytest
import torch
from torch import nn

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.recipe.factories import find_factory
from hqsweep.sweep.grid import checks
from hqsweep.sweep.grid.compose import expand
from hqsweep.train import data
from hqsweep.train.build import OPTIMIZER_CODE
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer

WORDS = ["data=markov", "data.markov.length=20000", "model.dim=32", "model.layers=1", "model.heads=1", "track=none",
         "train.steps=30", "train.batch=8", "train.context=32", "train.device=cpu", "train.lr=0.01", "recipe=mxfp8",
         "stats.every=0", "train.log_every=5", "train.warmup=0.1"]  # fmt: skip
HERE = "tests.train.test_optimizers"
NADAM = ["train.optimizer._target_=torch.optim.nadam.NAdam", "train.optimizer.momentum_decay=0.01"]
HELD = "model.quantized_weights=true"
NO_GPT = [word for word in WORDS if not word.startswith("model.")]


class Own(torch.optim.SGD):
    """An optimizer of the user's."""


class Small(nn.Module):
    """A bigram model with an embedding, positions, two hidden linears, a norm and a head."""

    def __init__(self, vocab: int = 16, width: int = 32) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(32, width))
        self.up, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.down, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, vocab)

    def forward(self, tokens):
        x = self.table(tokens) + self.positions[: tokens.shape[1]]
        return self.out(x + self.down(torch.relu(self.norm(self.up(x)))))


class Flat(nn.Sequential):
    """A model without a hidden layer."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(16, 32), nn.Linear(32, 16))


def trainer(*words: str) -> Trainer:
    own = NO_GPT if any(word.startswith("model._target_") for word in words) else WORDS
    (point,) = expand("convergence", [*own, *words]).points
    config = parse(point.config, find_factory)
    return Trainer(config, data.load(config.data), config.recipe.build(), torch.device("cpu"))


@pytest.mark.parametrize("words", [["train.optimizer=sgd"], ["train.optimizer=muon"],
                                   ["train.moments=bf16"], ["train.moments=fp8"], NADAM, [*NADAM, HELD],
                                   [f"model._target_={HERE}.Small", "train.optimizer=muon"],
                                   [f"model._target_={HERE}.Small", *NADAM, HELD]])  # fmt: skip
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


def test_muon_takes_hidden_matrices_of_a_users_model():
    own = trainer(f"model._target_={HERE}.Small", "train.optimizer=muon")
    names = {p: name for name, p in own.model.named_parameters()}
    groups = {group["rule"]: [names[p] for p in group["params"]] for group in own.optimizer.param_groups[:1]}
    assert groups == {"muon": ["up.weight", "down.weight"]}
    rest = [names[p] for group in own.optimizer.param_groups[1:] for p in group["params"]]
    assert {"table.weight", "positions", "up.bias", "norm.weight", "out.weight"} < set(rest)
    with pytest.raises(UserError, match="muon is for 2D weights of hidden layers, and Flat has none"):
        trainer(f"model._target_={HERE}.Flat", "model.head=true", "train.optimizer=muon")


def test_a_state_of_other_code_is_refused(tmp_path):
    own = trainer(f"train.optimizer._target_={HERE}.Own")
    list(own.steps(2))
    save_checkpoint(own, tmp_path)
    assert own.facts[OPTIMIZER_CODE].startswith(HERE)
    again = trainer(f"train.optimizer._target_={HERE}.Own")
    assert load_checkpoint(again, tmp_path) and again.step == 2
    again.facts[OPTIMIZER_CODE] = f"{HERE} 000000000000"
    with pytest.raises(UserError, match=rf"train.optimizer._target_: {HERE}.Own is other code than this state"):
        load_checkpoint(again, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.optimizer._target_=torch.optim.nadam.NAdam", "train.optimizer.momentum=1"],
         r"_target_: torch.optim.nadam.NAdam\(momentum=1\) raised TypeError: .*argument 'momentum'"),
        (["train.optimizer._target_=torch.optim.Muon"], r"raised ValueError: Muon only supports 2D parameters"),
        (["train.optimizer._target_=torch.nn.modules.linear.Identity"],
         r"gave Identity; it must give a torch.optim.Optimizer"),
        (["train.optimizer._target_=torch.optim.lbfgs.LBFGS"], r"raised ValueError: LBFGS"),
    ],
)  # fmt: skip
def test_a_class_is_tried_before_anything_starts(words, said):
    (point,) = expand("convergence", [*WORDS, *words]).points
    with pytest.raises(UserError, match=said):
        checks.check_optimizers([parse(point.config, find_factory)])
    with pytest.raises(UserError, match=said):
        trainer(*words)
    checks.check_optimizers([parse(point.config)])  # where it is a name


def test_the_config_of_a_class():
    def parsed(*words):
        kept = [word for word in WORDS if word.partition("=")[0] not in {own.partition("=")[0] for own in words}]
        return parse(expand("convergence", [*kept, *words]).points[0].config).train

    section = parsed(*NADAM).optimizer
    assert str(section) == "torch.optim.nadam.NAdam(momentum_decay=0.01)" and section.factory.is_name
    for words, said in (
        (["train.optimizer.momentum=1"], "train.optimizer._target_: missing; give a class"),
        ([*NADAM, "train.optimizer.lr=1"], "train.optimizer.lr: hqsweep gives train.lr; leave it out"),
        ([*NADAM, "train.moments=fp8"], "train.moments: fp8 rounds the moments of adamw, sgd and muon"),
        ([*NADAM, "train.parallel.dp_shard=2"], "takes whole parameters, but train.parallel has 2 ranks"),
        ([*NADAM, "train.device=cuda", "train.compile=graph"], "train.compile: graph holds no step of a class"),
        (["train.optimizer=adam"], "train.optimizer: got 'adam'; must be 'adamw', 'sgd' or 'muon'"),
    ):
        with pytest.raises(UserError, match=said):
            parsed(*words)
    swept = expand("convergence", [*WORDS, "train.optimizer._target_=torch.optim.nadam.NAdam,torch.optim.radam.RAdam"])
    assert [point.arm for point in swept.points] == ["mxfp8_optimizer-NAdam", "mxfp8_optimizer-RAdam"]
