"""Allocations of bits by sensitivity: the damage is squared gradients times squared errors, and it finds the layers on
which the loss depends."""

import pytest
import torch
from support.models.tiny import tiny, tokens
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import parse
from hqsweep.jobs.probe.job import parse_quantizers
from hqsweep.jobs.probe.loss import losses_at_once
from hqsweep.jobs.probe.sensitivity import RANDOM, allocations, judged, sensitive_rows
from hqsweep.jobs.probe.suggest import suggest
from hqsweep.models.head_loss import model_loss
from hqsweep.recipe.argument import parse_recipe

FORMATS = parse_quantizers(["mxfp8", "mxfp4"])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A model whose middle layer alone has a part in the loss: the others write next to nothing."""
    model = tiny("llama", num_hidden_layers=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        for index in (0, 2):
            model.model.layers[index].mlp.down_proj.weight.mul_(1e-3)
            model.model.layers[index].self_attn.o_proj.weight.mul_(1e-3)
    return model


@pytest.fixture(scope="module")
def rows(model):
    return sensitive_rows(model, tokens(3, 33), FORMATS)


def row_of(rows, tensor: str, quantizer: str, direction: str = "rowwise"):
    (row,) = (r for r in rows if (r["tensor"], r["quantizer"], r["direction"]) == (tensor, quantizer, direction))
    return row


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_damage_is_the_sum_of_squared_gradients_times_squared_errors(model, rows, direction):
    name, ids = "model.layers.1.mlp.up_proj", tokens(3, 33)
    weight, squares = model.get_submodule(name).weight, 0
    for sequence in ids:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model_loss(model, sequence[None, :-1], sequence[None, 1:])[0].backward()
        squares = squares + weight.grad.square() / 3
    model.zero_grad()
    x, format = weight.detach().bfloat16(), parse("mxfp4")
    x = x if direction == "rowwise" else x.t().contiguous()
    error = x.float() - format.decode(format.encode(x), tuple(x.shape))
    squares = squares if direction == "rowwise" else squares.t()
    row = row_of(rows, f"{name}.weight", "mxfp4", direction)
    assert row["damage"] == pytest.approx(32 / 2 * (error.square() * squares).sum().item(), rel=1e-3)
    assert row["rel_l2"] == pytest.approx((error.norm() / x.float().norm()).item(), rel=1e-3)
    assert row["shape"] == list(weight.shape) and row["bits"] == 4.25
    assert row_of(rows, f"{name}.input", "mxfp4")["shape"] == [96, weight.shape[1]]


def test_an_inputs_damage_predicts_the_rise_of_the_loss_within_a_factor(model, rows):
    """For the input of the head's last layer in a small format, whose error is small enough for the second order."""
    name = "model.layers.1.mlp.down_proj"
    recipe = {"name": "r", "linear": "bf16", "overrides": [{"name": name, "linear": {"input": "mxfp4|bf16",
              "weight": "bf16", "grad_output": "bf16"}}]}  # fmt: skip
    losses = losses_at_once(model, tokens(3, 33), {"plain": {"name": "p", "linear": "bf16"}, "own": recipe})
    assert abs(losses["own"] - losses["plain"]) < 30 * row_of(rows, f"{name}.input", "mxfp4")["damage"]


def test_the_layer_that_counts_gets_the_bits(rows):
    def bits(suggestion, layer: int) -> float:
        own = [c for c in suggestion.choices if c.tensor.startswith(f"model.layers.{layer}.mlp.up_proj")]
        return sum(c.bits * c.elements for c in own) / sum(c.elements for c in own)

    weighted = suggest(rows, 5.0)
    assert bits(weighted, 1) > 8 and bits(weighted, 0) < 5
    plain = suggest([{**row, "damage": None} for row in rows], 5.0)
    assert weighted.damage < sum(row_of(rows, c.tensor, c.quantizer)["damage"] for c in plain.choices)


def test_random_allocations_spend_the_same_bits(rows):
    own, others = suggest(rows, 6.0), [suggest(rows, 6.0, seed=seed) for seed in range(4)]
    assert all(5.3 < other.bits <= 6 for other in others) and own.damage <= min(other.damage for other in others)
    assert len({tuple(other.choices) for other in others}) == 4 and others[0] == suggest(rows, 6.0, seed=0)


def test_arms_are_recipes_of_the_budget_and_are_judged(model, rows):
    arms = allocations(rows, 6.0)
    assert [arm.name for arm in arms] == ["bits6", "bits6_unweighted", *(f"bits6_random{i}" for i in range(RANDOM))]
    losses = losses_at_once(model, tokens(3, 33), {arm.name: arm.whole() for arm in arms})
    said = judged(arms, losses, 1.0)
    assert said.startswith("bits6 raises the loss by") and f"of {RANDOM}" in said
    assert all(parse_recipe(arm.whole()) for arm in arms)
    worst = {arm.name: 1.0 + (0.5 if arm.name == "bits6" else 0.1) for arm in arms}
    assert judged(arms, worst, 1.0).endswith("it is below 0 of 3, so it is no better than chance here")


def test_the_model_is_as_before(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    sensitive_rows(model, tokens(1, 17), parse_quantizers(["mxfp4+sr"]))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_a_model_without_linears_is_refused():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 16)

        def forward(self, tokens):
            return self.table(tokens)

    with pytest.raises(UserError, match=r"nothing of Table is taken|no nn.Linear that a recipe takes"):
        sensitive_rows(Table(), tokens(1, 17) % 16, FORMATS)
