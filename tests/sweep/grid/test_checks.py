"""Arms that quantize nothing on their model, or repeat another arm, are named before anything starts."""

import re
import sys
from pathlib import Path

import pytest
from support.models.tiny import tiny
from typer.testing import CliRunner

from hqsweep.api.sweep import run
from hqsweep.cli.main import app
from hqsweep.recipe.factories import Importer
from hqsweep.sweep.engine.launch import plan

pytestmark = pytest.mark.slow

BASE = {
    "conf": "convergence", "track": "none", "data": "markov", "data.markov.length": "4096", "train.steps": "2",
    "train.batch": "2", "train.context": "32", "train.eval_batches": "1", "train.device": "cpu", "stats.every": "0",
    "model.dim": "32", "model.layers": "2", "model.heads": "2", "recipe": "bf16,mxfp8",
}  # fmt: skip
MODEL = """
from torch import nn

class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cells, self.out = nn.Embedding(32, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, tokens):
        return self.out(self.cells(self.table(tokens))[0])
"""


def words(**changes) -> list[str]:
    keys = BASE | {key.replace("__", "."): value for key, value in changes.items()}
    if "model" in keys or "model._target_" in keys:
        keys = {key: value for key, value in keys.items() if key not in ("model.dim", "model.layers", "model.heads")}
    return [f"{key}={value}" for key, value in keys.items() if value is not None]


def said(importer=None, **changes) -> list[str]:
    return list(plan(words(**changes), importer=importer).same)


ALL_BACK = "[{name:'*',linear:bf16}]"
FORKS = {"fork__at": "2", "fork__steps": "2", "fork__decay": "2", "fork__warmup": "1", "train__steps": None}
VAIN = {
    "all is taken back": ({"recipe__overrides": ALL_BACK}, "recipe.overrides take back all 8 modules"),
    "no experts": ({"recipe": "bf16,mine"}, "recipe.grouped_linear meets no module"),
    "forks": ({"recipe__overrides": ALL_BACK, **FORKS}, "recipe.overrides take back all 8 modules"),
}  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A recipe mine.yaml and a module my_lstm.py in ./conf."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "conf")])
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/mine.yaml").write_text("name: mine\nlinear: bf16\ngrouped_linear: mxfp8\n")
    (tmp_path / "conf/my_lstm.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("my_lstm", None)


@pytest.mark.parametrize(("changes", "why"), VAIN.values(), ids=VAIN)
def test_an_arm_that_quantizes_nothing_is_named_with_the_reason(mine, changes, why):
    (line,) = said(**changes)
    assert re.match(r"warning: arm '\w+' quantizes nothing on this model, so its runs repeat those of the bas", line)
    assert f"baseline 'bf16': {why}" in line and ". Leave the arm out, or quantize what this model has" in line


def test_arms_that_quantize_something_are_not_named(mine):
    assert said() == said(null_arm="true") == []
    assert said(recipe__overrides="[{name:'layers.0.*',linear:bf16}]") == []
    assert said(recipe="bf16,nvfp4_linear_fp8_dpa", recipe__linear="bf16") == [], "attention is quantized"
    assert said(model__experts="4", recipe="bf16,mine") == []
    assert said(recipe="bf16,fp32") == said(recipe="bf16") == []
    assert said(recipe="bf16,mxfp8", train__lr="0.1,0.2") == []


def test_each_baseline_has_its_own_arms_and_twins_are_named_without_one(mine):
    lines = said(recipe__overrides=ALL_BACK, train__lr="0.1,0.2")
    assert len(lines) == 2 and all(
        f"the baseline 'bf16_lr-{lr}'" in line for lr, line in zip((0.1, 0.2), lines, strict=True)
    )
    (alone,) = said(recipe="mxfp8", recipe__overrides=ALL_BACK)
    assert alone.startswith("warning: arm 'mxfp8' quantizes nothing on this model: recipe.overrides")
    (twin,) = said(recipe="mxfp8,nvfp4", recipe__overrides="[{name:'*',linear:mxfp8}]")
    assert "'nvfp4' has the operands of the baseline 'mxfp8' on this model, so all their runs are equal." in twin


def test_models_of_users(mine):
    importer = Importer(lambda line: None, allowed=None)
    own = {"model___target_": "my_lstm.LSTM", "model__head": "true"}
    (line,) = said(importer, **own)
    assert "recipe.linear meets no module here, and head takes recipe.head, in high precision" in line
    assert line.endswith("(by recipe.head).")
    assert said(importer, **own, recipe__head="mxfp8", recipe="mxfp8") == []
    (unknown,) = said(**own)
    assert unknown.startswith("not known here: whether 'mxfp8' quantizes anything on this model; `hqsweep run` says it")
    tiny("llama").save_pretrained(mine / "llama")
    llama = {"model": "hf", "model__path": str(mine / "llama"), "train__context": "64"}
    assert said(**llama) == []
    (line,) = said(**llama, recipe__overrides=ALL_BACK)
    assert "recipe.overrides take back all 14 modules" in line


def test_run_dry_run_and_python_say_it(mine):
    vain = words(recipe__overrides=ALL_BACK, sweep="vain")
    shown = CliRunner().invoke(app, ["run", *vain, "--dry-run"])
    assert shown.exit_code == 0 and "warning: arm 'mxfp8' quantizes nothing on this model" in shown.stdout
    as_json = CliRunner().invoke(app, ["run", *vain, "--dry-run", "--json"])
    assert as_json.stdout.startswith("[") and "warning: arm 'mxfp8' quantizes nothing" in as_json.stderr


@pytest.mark.usefixtures("forked_workers")
def test_a_run_says_it_first_and_compare_says_it_again(mine, capsys):
    own = words(model___target_="my_lstm.LSTM", model__head="true", engine__workers="1", sweep="lstm")
    conf, *overrides = own
    sweep = run(conf.removeprefix("conf="), overrides)
    assert "warning: arm 'mxfp8' quantizes nothing on this model" in capsys.readouterr().err
    manifest = sweep["mxfp8-s0"].manifest["converted"]
    assert manifest["quantized_share"] == 0 and 0 < manifest["share"] < 1
    log = sweep["mxfp8-s0"].log
    assert "skipped cells (convert has no products of nn.LSTM)" in log and f"model: {manifest['text']}\n" in log
    compared = CliRunner().invoke(app, ["compare", "lstm", "--check"])
    assert compared.exit_code == 1 and "'mxfp8' is identical to bf16: nothing was quantized" in compared.stdout
