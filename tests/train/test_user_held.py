"""model.quantized_weights of users' own models: trainings of plain weights to the byte, resumed, forked, exported."""

import json
import re
from types import SimpleNamespace

import pytest
from cases import LINEARS
from safetensors.torch import load_file
from support.models.tiny import tiny

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.errors import UserError
from hqsweep.models.held import held_parts
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.sweep.export import export_run
from hqsweep.sweep.grid.checks import check_recipes
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.fork import start_from
from tests.train.test_user_model import config, same, trainer, weights

pytestmark = pytest.mark.slow

NVFP4, DELAYED = LINEARS["nvfp4"], LINEARS["fp8_delayed"]
HELD = {"quantized_weights": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, kind, options in (("llama", "llama", {"tie_word_embeddings": True}), ("mixtral", "mixtral", {}),
                                ("gpt2", "gpt2", {"resid_pdrop": 0.1})):  # fmt: skip
        tiny(kind, **options).save_pretrained(root / name)
    return root


def pair(model, linear, **options):
    """The config of plain weights, and that of held ones."""
    section = {} if model == "factory" else {"kind": "hf", "path": str(model)}
    plain = config(section, linear, **options) if model == "factory" else config(model, linear, **options)
    keys = plain.model_copy(update={"model": plain.model.model_copy(update=HELD)})
    return plain, keys


def masters(t):
    """The value of each weight that training goes on from."""
    return {name: t.optimizer.master_param(p).detach().clone() for name, p in t.model.named_parameters()}


@pytest.mark.feature("H11")
@pytest.mark.parametrize(
    ("name", "linear", "train"),
    [("llama", NVFP4, {"microbatches": 2}), ("factory", DELAYED, {}),
     ("factory", "nvfp4|mxfp8@rowwise_dequantized", {"dtype": "fp32"}),
     pytest.param("mixtral", "mxfp8", {}, marks=pytest.mark.slow)],
    ids=["llama", "delayed", "fp32", "mixtral"],
)  # fmt: skip
def test_training_is_that_of_plain_weights(name, linear, train, folders):
    """Losses, norms, and statistics, whose errors of weights are those of the masters."""
    model = name if name == "factory" else folders / name
    plain, held = map(trainer, pair(model, linear, stats={"every": 2}, steps=4, context=16, **train))
    kinds = {part.name for _, part, _ in held_parts(held.model)}
    assert kinds == {part.module.name for part in held.adapter.conversion.parts} and not list(held_parts(plain.model))
    for ours, theirs in zip(held.steps(), plain.steps(), strict=True):
        assert ours == theirs
    assert same(masters(held), weights(plain))


@pytest.mark.feature("H11")
@pytest.mark.parametrize("linear", [DELAYED, "nvfp4|nvfp4+sr"], ids=["delayed", "random"])
def test_a_resumed_run_is_an_uninterrupted_one(linear, folders, tmp_path):
    _, cfg = pair(folders / "llama", linear, steps=4, context=16)
    whole, first = trainer(cfg), trainer(cfg)
    rows = [done.metrics for done in whole.steps()]
    for _ in first.steps(last=2):
        pass
    save_checkpoint(first, tmp_path)
    resumed = trainer(cfg)
    assert load_checkpoint(resumed, tmp_path) and resumed.step == 2
    assert [done.metrics for done in resumed.steps()] == rows[2:]
    assert same(masters(whole), masters(resumed))


@pytest.mark.feature("H11")
@pytest.mark.parametrize("linears", [("bf16", "mxfp8"), ("mxfp8", "bf16"), ("mxfp8", NVFP4)], ids=str)
def test_a_fork_goes_on_from_the_masters_of_its_trunk(linears):
    """Also where trunk or arm alone holds weights: bf16 is no quantized format. Against forks of plain weights."""
    results = []
    for index in (0, 1):
        trunk, arm = (trainer(pair("factory", linear, steps=4)[index]) for linear in linears)
        for _ in trunk.steps(last=2):
            pass
        state = trunk.state()
        start_from(arm.model, arm.optimizer, state)
        arm.step = 2
        results.append(([done.metrics for done in arm.steps()], masters(arm)))
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])


@pytest.mark.feature("H11")
@pytest.mark.parametrize("name", ["llama", "factory"])
def test_what_is_exported_are_the_masters(name, folders, tmp_path):
    _, cfg = pair(name if name == "factory" else folders / name, "mxfp8", steps=2, context=16)
    t = trainer(cfg)
    list(t.steps())
    run = RunDir(tmp_path / "t" / "r")
    run.path.mkdir(parents=True)
    run.config_path.write_text(json.dumps(cfg.model_dump(mode="json")))
    save_checkpoint(t, run.checkpoint)
    out, step = export_run(run, tmp_path / ("out" if name == "llama" else "out.safetensors"))
    values = load_file(inspect_checkpoint(out).files[0])
    assert step == 2 and same(values, {n: v for n, v in masters(t).items() if n in values})
    assert len(values) == len(masters(t))


@pytest.mark.feature("H11")
def test_what_cannot_be_held_is_said(folders, capsys):
    with pytest.raises(
        UserError, match=r"model.quantized_weights: no weight of GPT2.* can be held quantized \(.*c_attn: .*\[K, N\]\)"
    ):
        trainer(pair(folders / "gpt2", "mxfp8")[1])
    t = trainer(pair("factory", "bf16")[1])
    assert not list(held_parts(t.model)) and "its format is bf16" in capsys.readouterr().out
    t = trainer(config(HELD, "mxfp8"))
    assert isinstance(t.model.up.weight, HybridQuantizedTensor) and "plain weights" not in capsys.readouterr().out
    later = [{"at": 3, "linear": "nvfp4"}]
    _, cfg = pair(folders / "llama", "mxfp8", schedule=later)
    with pytest.raises(UserError, match=re.escape("recipe.schedule: from step 4 on")):
        check_recipes([SimpleNamespace(changed=[])], [cfg])
