"""What convert() takes of a model's multiplications, and the modules that it leaves, with reasons."""

import pytest
import torch
from support.models.tiny import tiny
from torch import nn

import hqsweep
from hqsweep.models.multiplied import experts_per_row, multiply_adds
from hqsweep.nn import Linear
from hqsweep.nn.core.module import set_recipe
from hqsweep.recipe.sectioned import Recipe

OVERRIDDEN = {"linear": "mxfp8", "overrides": [{"name": "*", "linear": "bf16"}]}


class Matrices(nn.Module):
    """Parameters of its own: a matrix, a stack, and vectors of other shapes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(32, 16))
        self.token, self.gain = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(32))


LEFT = {
    nn.LSTM: (nn.LSTM(32, 16, 2), 4 * 16 * (32 + 16) + 4 * 16 * (16 + 16)),
    nn.GRU: (nn.GRU(32, 16, bidirectional=True), 2 * 3 * 16 * (32 + 16)),
    nn.RNN: (nn.RNN(32, 16), 16 * (32 + 16)),
    nn.LSTMCell: (nn.LSTMCell(32, 16), 4 * 16 * (32 + 16)),
    nn.GRUCell: (nn.GRUCell(32, 16), 3 * 16 * (32 + 16)),
    nn.Conv1d: (nn.Conv1d(8, 16, 3), 8 * 16 * 3),
    nn.Conv2d: (nn.Conv2d(8, 16, 3, groups=2), 4 * 16 * 9),
    nn.Conv3d: (nn.Conv3d(8, 16, 1), 8 * 16),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(8, 16, 2), 8 * 16 * 4),
    nn.Bilinear: (nn.Bilinear(8, 8, 16), 8 * 8 * 16),
    nn.MultiheadAttention: (nn.MultiheadAttention(32, 2), 3 * 32 * 32),
    Matrices: (Matrices(), 32 * 16),
    Linear: (Linear(64, 64, name="own", recipe="mxfp8"), 64 * 64),
}


@pytest.mark.parametrize(("module", "count"), LEFT.values(), ids=[kind.__name__ for kind in LEFT])
def test_what_multiplies_and_is_not_taken_is_skipped_with_its_share(module, count):
    assert multiply_adds(module) == count
    conversion = hqsweep.convert(nn.ModuleDict({"own": module, "linear": nn.Linear(64, 64)}), "mxfp8")
    skipped = {each.name: each for each in conversion.skipped}
    why = {
        Matrices: "what Matrices computes of parameters of its own is not known: w (32, 16)",
        Linear: "it computes by a recipe of its own, which set_recipe changes",
    }.get(type(module), f"convert has no products of nn.{type(module).__name__}")
    assert skipped["own"].why == why and skipped["own"].multiply_adds == count
    others = sum(each.multiply_adds for each in conversion.skipped)
    assert conversion.share == conversion.quantized_share == 4096 / (4096 + others)
    assert why in str(conversion) and repr(conversion) == f"<Conversion: {conversion}>"


def test_what_looks_up_or_scales_is_neither_counted_nor_skipped():
    plain = (nn.Embedding(32, 32), nn.EmbeddingBag(32, 32), nn.LayerNorm((4, 32)), nn.BatchNorm2d(8), nn.PReLU(4))
    model = nn.Sequential(*plain, nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    conversion = hqsweep.convert(model, "mxfp8")
    assert conversion.skipped == [] and conversion.share == 1


def test_nothing_that_is_quantized_is_said_and_so_is_a_part():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    conversion = hqsweep.convert(model, OVERRIDDEN)
    whole = "converted 2 linear, 100 % of the model's multiplications by weights"
    assert str(conversion) == f"{whole}; nothing is quantized" and conversion.quantized_share == 0
    assert "nothing is quantized" in repr(conversion) and "nothing is quantized" in conversion._repr_html_()
    set_recipe(model, Recipe.from_config({"linear": "mxfp8", "overrides": [{"name": "0", "linear": "bf16"}]}))
    assert str(conversion) == f"{whole} (50 % are quantized)" and conversion.quantized_share == 0.5
    set_recipe(model, Recipe.from_config({"linear": "mxfp8"}))
    assert str(conversion) == whole


def test_a_share_is_100_or_0_only_where_it_is_all_or_nothing():
    model = nn.ModuleDict({"large": nn.Linear(4096, 4096), "small": nn.Conv1d(2, 2, 1)})
    assert ", 99.9 % of the model's" in str(hqsweep.convert(model, "mxfp8"))


def test_of_experts_those_count_that_a_row_takes():
    model = tiny("mixtral")
    conversion = hqsweep.convert(model, "mxfp8")
    experts, chosen = model.config.num_local_experts, experts_per_row(model)
    stacks = [part for part in conversion.parts if part.kind == "experts"]
    assert chosen == model.config.num_experts_per_tok < experts
    assert [part.multiply_adds for part in stacks] == [chosen * part.shape[0] * part.shape[1] for part in stacks]
    left = hqsweep.convert(tiny("mixtral"), "mxfp8", experts=False)
    reasons = {each.why: each.multiply_adds for each in left.skipped}
    assert (
        reasons["experts=False leaves it"]
        == sum(part.multiply_adds for part in stacks) // model.config.num_hidden_layers
    )
