"""benchmarks/plain_gpt.py: the reference is the same GPT as ours, dense and with experts."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.plain_gpt import PlainGPT, plain_step
from hqsweep.config.model import ModelConfig
from hqsweep.config.train import TrainConfig
from hqsweep.recipe import Recipe
from hqsweep.train.model import GPT

SHAPE = {"dim": 64, "layers": 2, "heads": 2}
MODELS = [ModelConfig(**SHAPE), ModelConfig(**SHAPE, experts=4, shared_expert=True, first_moe_layer=1)]
VOCABULARY, CONTEXT = 96, 32


def batch():
    tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def copy_weights(ours, plain):
    """The weights of our GPT in the places of the plain one's."""
    named = {"embedding": ours.embedding, "norm": ours.norm, "head": ours.head}
    for i, layer in enumerate(ours.layers):
        attn, mlp = layer.attn, layer.mlp
        named |= {
            f"blocks.{i}.norm1": attn.qkv.norm,
            f"blocks.{i}.attn.qkv": attn.qkv,
            f"blocks.{i}.attn.proj": attn.proj,
        }
        dense = not hasattr(mlp, "router")
        named |= {f"blocks.{i}.norm2": mlp.fc1.norm if dense else mlp.norm}
        parts = {"fc1": mlp.fc1, "fc2": mlp.fc2} if dense else {"router": mlp.router, "fc1": mlp.fc1, "fc2": mlp.fc2}
        named |= {f"blocks.{i}.mlp.{name}": part for name, part in parts.items()}
        if not dense and mlp.shared is not None:
            named |= {f"blocks.{i}.mlp.shared.{name}": getattr(mlp.shared, name) for name in ("fc1", "fc2")}
    weights = {name: module.weight.detach() for name, module in named.items()}
    state = plain.state_dict()
    taken = {key: weights.pop(key.removesuffix(".weight")) for key in state if key not in ("cos", "sin")}
    assert not weights
    plain.load_state_dict(state | taken)


@pytest.mark.parametrize("config", MODELS, ids=["dense", "experts"])
def test_the_same_weights_have_the_same_loss_and_gradients(config):
    torch.manual_seed(0)
    ours = GPT(config, VOCABULARY, Recipe.from_config({"linear": "bf16"}), torch.bfloat16)
    torch.nn.init.normal_(ours.head.weight, std=0.1)
    plain = PlainGPT(config, VOCABULARY, CONTEXT)
    copy_weights(ours, plain)
    inputs, targets = batch()
    logits, balance = ours.balanced(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + config.load_balance * balance.loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = plain(inputs, targets)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for grad, wanted in (
        (plain.embedding.weight.grad, ours.embedding.weight.grad),
        (plain.head.weight.grad, ours.head.weight.grad),
    ):
        assert (grad - wanted).norm() < 0.02 * wanted.norm()
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())


def test_a_step_trains():
    model = PlainGPT(MODELS[1], VOCABULARY, CONTEXT)
    step = plain_step(model, batch, TrainConfig(), compiled=False)
    losses = [step().item() for _ in range(6)]
    assert losses[-1] < losses[0]
