"""Trials of a user's model before anything starts; one that sees later tokens is refused."""

import pytest
import torch
import transformers
from support.models.tiny import tiny
from torch import nn

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.recipe.factories import find_factory
from hqsweep.sweep.grid import trial
from hqsweep.sweep.grid.trial import check_causal, check_trial

HERE = "tests.sweep.grid.test_trial"


class Bigram(nn.Module):
    def __init__(self, why: str = "") -> None:
        super().__init__()
        self.why = why
        self.table, self.up, self.out = nn.Embedding(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        if self.why and not tokens.is_cuda:
            raise RuntimeError(self.why)
        return self.out(self.up(self.table(tokens)))


class Pixels(Bigram):
    def forward(self, images):
        return self.out(self.up(images))


class Mixed(Bigram):
    """Computes under autocast alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up.to(torch.bfloat16)


class Seeing(Bigram):
    def forward(self, tokens):
        return super().forward(tokens).cumsum(1).flip(1)


def config(name, dtype="bf16", **arguments):
    model = {"_target_": f"{HERE}.{name}"} | arguments
    train = {"context": 24, "dtype": dtype, "device": "cpu"}
    data = {"source": "markov", "markov": {"length": 20000}}
    recipe = {"name": "r", "linear": "mxfp8"}
    return parse({"job": "convergence", "sweep": "t", "model": model, "train": train, "data": data,
                  "recipe": recipe}, find_factory)  # fmt: skip


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.setattr(trial, "_TRIED", set())


def test_a_model_that_needs_a_gpu_is_left_to_its_run():
    needs = config("Bigram", why="it takes a GPU")
    check_trial(needs, on_cpu=False)
    with pytest.raises(UserError, match=r"Bigram raised RuntimeError for tokens \(2, 24\): it takes a GPU; it must be"):
        check_trial(needs, on_cpu=True)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_module_of_torch_refuses_tokens_on_every_device(on_cpu):
    with pytest.raises(UserError, match=r"Pixels raised RuntimeError for tokens \(2, 24\): "):
        check_trial(config("Pixels"), on_cpu=on_cpu)


def test_a_model_is_tried_in_the_autocast_of_its_run():
    check_trial(config("Mixed"), on_cpu=True)
    with pytest.raises(UserError, match="Mixed raised RuntimeError"):
        check_trial(config("Mixed", dtype="fp32"), on_cpu=True)


def test_a_large_model_is_left_to_its_run(monkeypatch):
    monkeypatch.setattr(trial, "MOST", 10)
    check_trial(config("Seeing"), on_cpu=True)
    monkeypatch.undo()
    monkeypatch.setattr(trial, "_TRIED", set())
    with pytest.raises(UserError, match="Seeing sees tokens that come later"):
        check_trial(config("Seeing"), on_cpu=True)


def test_a_model_is_tried_once(monkeypatch):
    calls = []
    monkeypatch.setattr(trial, "check_causal", lambda *arguments: calls.append(arguments))
    for _ in range(2):
        check_trial(config("Bigram"), on_cpu=True)
    assert len(calls) == 1


VOCAB = 96


class Attention(nn.Module):
    """Logits of an attention, causal or not; it drops in evaluation, too."""

    def __init__(self, causal: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal = causal
        self.table, self.out = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.to(dtype)

    def forward(self, tokens):
        x = nn.functional.dropout(self.table(tokens), 0.1)[:, None]
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)[:, 0])


class WithLoss(Attention):
    def loss(self, tokens, targets):
        return self(tokens).square().mean()


class Failing(Attention):
    def forward(self, tokens):
        raise RuntimeError("it takes a GPU")


def bert(**options):
    return transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            **options,
        )
    )


@pytest.mark.parametrize(
    "model",
    [
        lambda: Attention(causal=False),
        lambda: Attention(causal=False, dtype=torch.bfloat16),
        lambda: bert().eval(),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(model):
    model = model()
    with pytest.raises(
        UserError, match=r"model: (Attention|BertLMHeadModel) sees tokens that come later: .*is_decoder"
    ):
        check_causal(model, VOCAB)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_models_of_hugging_face_are_causal(kind):
    check_causal(tiny(kind), VOCAB)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Attention(causal=True),
        lambda: Attention(causal=True, dtype=torch.bfloat16),
        lambda: WithLoss(causal=False),
        lambda: Failing(causal=False),
        lambda: bert(is_decoder=True),
    ],
)
def test_what_is_causal_or_cannot_be_told_passes_and_nothing_changes(model):
    model, drawn = model(), torch.get_rng_state()
    check_causal(model, VOCAB)
    assert model.training and torch.equal(torch.get_rng_state(), drawn)
