"""The causes of a model's loss in a recipe: layers, linears, operands and channels; and the study of treatments."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.models.tiny import VOCABULARY, tiny, tokens
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.errors import UserError
from hqsweep.jobs.probe.loss import Causes, Channel, Part, losses_at_once, probe_loss
from hqsweep.jobs.probe.treatments import treatments
from hqsweep.models.head_loss import model_loss
from hqsweep.sweep.engine.launch import plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outlying() -> torch.nn.Module:
    """A model whose residual stream has one large channel, 5, from its embedding on, and whose second layer writes by
    large weights of its MLP, which a recipe cannot hold well."""
    model = tiny("llama", num_hidden_layers=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] = 3000 * torch.randn(VOCABULARY).sign()
        model.model.layers[1].mlp.down_proj.weight.mul_(torch.randn(96).exp() * 8)
    return model.eval()


@pytest.fixture(scope="module")
def causes(outlying) -> Causes:
    return probe_loss(outlying, tokens(4, 33), "nvfp4")


def test_the_parts_that_cause_the_loss_are_named(causes, outlying) -> None:
    ids = tokens(4, 33)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model_loss(outlying, ids[:, :-1], ids[:, 1:])[0].item()
    assert causes.reference == pytest.approx(plain, rel=1e-3) and causes.tokens == 4 * 32
    assert [part.name for part in causes.slots] != [] and {part.name for part in causes.slots} == {"input", "weight"}
    assert {part.name for part in causes.layers} == {f"model.layers.{i}" for i in range(3)}
    assert len(causes.kinds) == 7 and all("model.layers.*." in part.name for part in causes.kinds)
    assert [part.loss for part in causes.layers] == sorted((part.loss for part in causes.layers), reverse=True)
    largest = causes.channels[0]
    assert (largest.channel, largest.layers) == (5, 3) and largest.massive > 1000 and largest.ratio > 100
    assert causes.increase == pytest.approx(causes.loss - causes.reference)


def test_one_part_alone_is_the_recipe_with_the_others_in_bf16(causes, outlying) -> None:
    forward = {"input": "nvfp4|bf16", "weight": "nvfp4+2d|bf16", "grad_output": "bf16"}
    recipes = {
        "all": {"name": "a", "linear": forward},
        "one": {"name": "o", "linear": "bf16", "overrides": [{"layers": 1, "linear": forward}]},
        "weight": {"name": "w", "linear": {**forward, "input": "bf16"}},
    }
    losses = losses_at_once(outlying, tokens(4, 33), recipes)
    assert losses["all"] == causes.loss
    assert losses["one"] == next(part.loss for part in causes.layers if part.name == "model.layers.1")
    assert losses["weight"] == next(part.loss for part in causes.slots if part.name == "weight")


def test_the_model_is_as_before_and_wrong_recipes_are_refused(outlying) -> None:
    before = {name: value.clone() for name, value in outlying.state_dict().items()}
    with pytest.raises(UserError, match="quantizes no operand of a forward"):
        probe_loss(outlying, tokens(2, 17), "bf16")
    probe_loss(outlying, tokens(2, 17), "mxfp4")
    assert all(torch.equal(before[name], value) for name, value in outlying.state_dict().items())
    assert not outlying.training and not any(m._forward_hooks or m._forward_pre_hooks for m in outlying.modules())


def test_exact_channels_take_the_part_of_the_loss_that_they_cause(causes, outlying) -> None:
    """With every channel in high precision the inputs' part of the loss would be gone; with the largest, some is."""
    assert causes.without_channels < causes.loss and 0 < causes.channel_share <= 1.2


def parts(*shares: float) -> tuple[Part, ...]:
    ranked = sorted(enumerate(shares), key=lambda pair: -pair[1])
    return tuple(Part(name=f"model.layers.{i}", loss=1 + share, share=share) for i, share in ranked)


def made(recipe: str, *shares: float) -> Causes:
    channel = Channel(channel=5, ratio=30.0, layer="model.layers.1", layers=2, massive=None, position=0)
    return Causes(
        recipe=recipe, tokens=64, reference=1.0, loss=2.0, without_channels=1.5, layers=parts(*shares), kinds=(),
        slots=(), channels=(channel,),
    )  # fmt: skip


SHAPES = {"model.layers.0.mlp.up_proj": (96, 64), "model.layers.0.mlp.down_proj": (64, 96), "model.x": (4, 512)}


def test_treatments_follow_the_causes() -> None:
    arms = {arm.name: arm for arm in treatments(made("nvfp4", *[0.05] * 5, 0.6, *[0.01] * 6), SHAPES)}
    assert list(arms) == [
        "nvfp4",
        *(f"nvfp4_{x}" for x in ("ends_bf16", "worst_bf16", "fc2_8bit", "row_scaled", "4over6")),
    ]
    assert arms["nvfp4_worst_bf16"].overrides["recipe.overrides"] == [{"layers": [5], "linear": "bf16"}]
    ends = arms["nvfp4_ends_bf16"].overrides["recipe.overrides"]
    assert [entry["layers"] for entry in ends] == ["first(1)", "last(2)"]
    (second,) = arms["nvfp4_fc2_8bit"].overrides["recipe.overrides"]
    assert second["name"] == "model.layers.*.mlp.down_proj" and second["linear"]["input"] == "mxfp8"
    assert arms["nvfp4_row_scaled"].overrides["recipe.linear.input"] == "nvfp4+row_scaled|nvfp4+rht"
    plain = [arm.name for arm in treatments(made("nvfp4_1d_weight", 0.4, 0.5, 0.1), {})]
    assert "nvfp4_1d_weight_fc2_8bit" not in plain
    mx = [arm.name for arm in treatments(made("mxfp4", 0.4, 0.5, 0.1), SHAPES)]
    assert mx[:3] == ["mxfp4", "mxfp4_ends_bf16", "mxfp4_worst_bf16"] and not any("row_scaled" in name for name in mx)


def test_the_command_names_causes_and_writes_a_study_that_runs(outlying, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outlying.save_pretrained("model")
    Path("shards").mkdir()
    stream = torch.randint(VOCABULARY, (6000,), generator=torch.Generator().manual_seed(2)).numpy().astype("<u2")
    for name, part in (("train", stream), ("val", stream[:2000])):  # as llm.c writes them
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(part)
        Path(f"shards/{name}.bin").write_bytes(header.tobytes() + part.tobytes())
    Path("shards/meta.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    words = ["probe", "model", "--data", "shards", "--tokens", "128", "--study", "treat.yaml", "--json"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["channels"][0]["channel"] == 5 and len(document["layers"]) == 3
    arms = {each["arm"]: each["loss"] for each in document["treatments"]}
    assert "nvfp4_fc2_8bit" in arms and yaml.safe_load(Path("treat.yaml").read_text())["fork"]
    ran = CliRunner().invoke(app, [*words, "--bits", "6", "--formats", "mxfp8,mxfp4"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    arms = {each["arm"]: each["loss"] for each in document["treatments"]}
    assert {"bits6", "bits6_unweighted", "bits6_random0"} < set(arms) and "random allocations" in document["judged"]
    small = ["train.steps=20", "fork.at=[10,20]", "fork.steps=4", "fork.decay=4", "train.batch=2", "train.context=32"]
    ready = plan(["conf=treat.yaml", *small, "seed=0"])
    assert {point.arm for point in ready.points if "trunk" not in point.arm} >= {"bf16", *arms}
    assert "nvfp4_worst_bf16" in Path("treat.yaml").read_text().partition("defaults")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model", "--study", "a.yaml"], "--study: treatments need the loss of a model; give --data SHARDS"),
        (["model", "--data", "s", "--csv", "a.csv"], "--csv: is of a probe of tensors, and --data probes the loss"),
        (["model", "--data", "s", "--study", "a.txt"], "a study's file must end in .yaml or .yml"),
        (["model", "--data", "s"], "--data: 's' does not exist"),
    ],
)
def test_words_that_make_no_sense_get_a_sentence(words, sentence, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["probe", *words])
    assert ran.exit_code == 2 and sentence in ran.stderr, ran.output
