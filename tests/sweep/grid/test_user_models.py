"""Users' own models in a plan: what is refused before anything starts and by which sentence, hashes and ids, grids, and
runs of a Hugging Face model and of a function's from the command line."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny import tiny
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.errors import UserError
from hqsweep.recipe.factories import Importer
from hqsweep.sweep.engine.launch import check, plan
from hqsweep.sweep.grid.run_words import read

pytestmark = pytest.mark.slow

BASE = {
    "conf": "convergence", "track": "none", "data": "markov", "data.markov.length": "20000",
    "train.steps": "4", "train.batch": "4", "train.context": "32", "train.eval_batches": "1", "train.device": "cpu",
    "stats.every": "2",
}  # fmt: skip
FACTORY = """
from torch import nn

def build(width=32, vocab=16):
    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, width), nn.Linear(width, vocab))

class Wrong(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.model, self.what = build(), what

    def forward(self, tokens):
        logits = self.model(tokens)
        return {"logits": logits} if self.what == "dict" else logits.transpose(0, 1)

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.out = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 16)

    def forward(self, images):
        return self.out(self.patches(images).flatten(2).mean(-1))

class Patches(Pixels):  # which refuses tokens itself
    def forward(self, images):
        return super().forward(images.view(-1, 3, 5, 5).float())

class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(16, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.out(x + x.mean(1, keepdim=True))

class Asking(nn.Module):  # for a value, which the meta device does not have
    def __init__(self):
        super().__init__()
        self.model = build()

    def forward(self, tokens):
        return self.model(tokens) * (2 if tokens.max() > 3 else 1)

def hugging_face():
    import transformers
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4))
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def words(path: object, *more: str) -> list[str]:
    """The words of a study of a Hugging Face model; a key of `more` replaces that of BASE."""
    return study_words("model=hf", f"model.path={path}", *more)


def study_words(*more: str) -> list[str]:
    return [f"{key}={value}" for key, value in (BASE | dict(word.split("=", 1) for word in more)).items()]


def told(folder: Path, **changes) -> Path:
    """The folder, whose config says something else."""
    file = folder / "config.json"
    keys = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in keys.items() if value is not ...}))
    return folder


def with_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    return folder


def without_head(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if k != "lm_head.weight"}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def alone(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder / "model.safetensors"


def no_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def cut(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    ("spoil", "more", "sentence"),
    [
        (lambda f: f / "nowhere", (), "nowhere' is not there; give the folder of a Hugging Face model"),
        (alone, (), "model.safetensors' is a checkpoint, and does not say of which model"),
        (no_json, (), "is no JSON"),
        (lambda f: f / "config.json", (), "is a config alone; give the folder that has the weights too, or"),
        (lambda f: told(f, model_type=...), (), "has no model_type, so it is no config of a Hugging Face model"),
        (lambda f: told(f, auto_map={"AutoModel": "their.Model"}), (), "its own (their.Model), which is never run"),
        (lambda f: told(f, quantization_config={"quant_method": "fp8"}), (), "its weights are quantized"),
        (with_adapter, (), "has adapter_config.json, so its weights are an adapter's or have one beside them; merge"),
        (cut, (), "copy it again (model.pretrained=false begins with random weights)"),
        (lambda f: told(f, vocab_size=100), (), "has 96 rows, but config.json says vocab_size 100"),
        (without_head, (), "says tie_word_embeddings=false, but the weights have no output projection"),
        (lambda f: f, ("train.context=256",), "train.context: 256, but the model of '"),
        (lambda f: f, ("data=stdlib",), "the data has 256 tokens, but the model of '"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_at_once(spoil, more, sentence, copy) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        read(words(spoil(copy), *more))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("recipe=nvfp4", "train.batch=1", "train.context=24"), "the contracted axis has 24 elements, but"),
        (("recipe.linear=mxfp8|nvfp4@rowwise_dequantized", "recipe.gemm=strict"), "cannot meet"),
        (
            ("+recipe.overrides=[{name: 'layers.*', linear: bf16}]",),
            "matches no module; the model has model.layers.0.self_attn.q_proj to",
        ),
        (("train.recompute=attention",), "train.recompute: attention alone is computed again by hqsweep's own GPT"),
        (("recipe=bf16,nvfp4", "train.batch=1", "train.context=24"), "(in the run with recipe=nvfp4)"),
    ],
)
def test_recipes_are_checked_by_the_shapes_of_the_model(more, sentence, llama) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        plan(words(llama, *more))


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("model.norm.weight", (), "lack model.norm.weight: half a checkpoint, or one of another model"),
        ("model.norm.weight", (2,), "model.norm.weight is [2] in '"),
    ],
)
def test_other_weights_than_the_config_s_are_refused_before_they_are_read(name, shape, sentence, copy) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors[name]
    tensors |= {name: torch.zeros(shape)} if shape else {}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=re.escape(sentence)):
        plan(words(copy))


def test_a_type_of_model_that_nobody_knows_is_refused(copy) -> None:
    with pytest.raises(UserError, match=r"'.*config.json' \(mine\): "):
        plan(words(told(copy, model_type="mine")))


def test_the_id_is_that_of_the_model_wherever_it_lies(llama, copy, tmp_path) -> None:
    def run(path, *more):
        return plan(words(path, *more)).rows()[0]["run"].rpartition("-")[2]

    here = run(llama)
    assert run(copy) == here
    told(copy, transformers_version="1", _name_or_path="elsewhere")
    random = run(llama, "model.pretrained=false")
    assert run(copy, "model.pretrained=false") == random == run(copy / "config.json", "model.pretrained=false") != here
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert run(copy) != here
    told(copy, rms_norm_eps=1e-3)
    assert run(copy, "model.pretrained=false") != random


def test_a_grid_over_models_names_arms_by_their_folders(llama, copy) -> None:
    arms = [row["arm"] for row in plan(words(f"{llama},{copy}", "recipe=bf16,mxfp8")).rows()]
    assert arms == ["bf16_path-llama", "mxfp8_path-llama", "bf16_path-copy", "mxfp8_path-copy"]


def test_a_function_is_imported_by_run_alone(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine_20.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    mine = ("model._target_=mine_20.build",)
    assert (
        len(plan(study_words(*mine, "model.width=32,64"), config_dir=tmp_path).points) == 2
        and "mine_20" not in sys.modules
    )
    said: list[str] = []
    ready = plan(study_words(*mine, "model.width=32,64"), config_dir=tmp_path, importer=Importer(said.append))
    assert said == ["importing mine_20 for model._target_=mine_20.build"]
    assert ready.imports == ("--import=mine_20.build", f"--import-from={tmp_path}")
    check(ready)
    with pytest.raises(UserError, match=r"'mine_20\.build' is a Python factory, refused"):
        plan(study_words(*mine), config_dir=tmp_path, importer=Importer(said.append, allowed=(), refusal="refused"))
    with pytest.raises(UserError, match=r"model: the data has 16 tokens, but its embedding has 8 rows"):
        check(plan(study_words(*mine, "model.vocab=8"), config_dir=tmp_path, importer=Importer(said.append)))
    with pytest.raises(UserError, match=r"mine_20.build\(depth=2\) raised TypeError"):
        plan(study_words(*mine, "model.depth=2"), config_dir=tmp_path, importer=Importer(said.append))
    for what, came in (("dict", "dict"), ("turned", r"\(32, 2, 16\)")):
        wrong = study_words("model._target_=mine_20.Wrong", f"model.what={what}")
        with pytest.raises(UserError, match=rf"model: Wrong gave {came} for tokens \(2, 32\); it must be of Hugging"):
            plan(wrong, config_dir=tmp_path, importer=Importer(said.append))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "Pixels",
            r"model: Pixels raised RuntimeError for tokens \(2, 32\): Input type .*; it must be of Hugging Face",
        ),
        ("Patches", r"model: Patches raised RuntimeError for tokens \(2, 32\): .*; it must be of Hugging Face"),
        ("hugging_face", r"model: ViTForImageClassification raised AttributeError for tokens \(2, 32\): "),
        ("Seeing", "model: Seeing sees tokens that come later"),
        ("Asking", None),
    ],
)
def test_a_model_of_something_else_than_tokens_is_refused_at_once(name, sentence, tmp_path, monkeypatch) -> None:
    (tmp_path / "mine_22.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    own = study_words(f"model._target_=mine_22.{name}", "recipe=bf16,mxfp8")
    with nullcontext() if sentence is None else pytest.raises(UserError, match=sentence):
        plan(own, config_dir=tmp_path, importer=Importer(lambda line: None))


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("pretrained", [False, True])
def test_an_encoder_of_hugging_face_is_refused_by_a_dry_run(is_decoder, pretrained, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("bert", intermediate_size=96, is_decoder=is_decoder).save_pretrained(tmp_path / "bert")
    asked = words(tmp_path / "bert", f"model.pretrained={str(pretrained).lower()}", "recipe=bf16,mxfp8")
    ran = CliRunner().invoke(app, ["run", *asked, "--dry-run"])
    refused = "model: BertLMHeadModel sees tokens that come later" in ran.stderr
    assert (ran.exit_code, refused) == ((0, False) if is_decoder else (2, True)), ran.output
    assert ("2 to do" in ran.stdout) == is_decoder and not (tmp_path / "runs").exists()


def check_two_runs(printed: str) -> None:
    """Two finished runs, whose losses differ, but not by much."""
    results = json.loads(printed)
    assert [result["state"] for result in results] == ["finished"] * 2
    losses = [result["val_loss"] for result in results]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.1


TWO = ("recipe=bf16,mxfp8", "engine.workers=1", "engine.threads=1")


@pytest.mark.usefixtures("forked_workers")
def test_runs_of_a_hugging_face_model(llama, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["run", *words(llama, *TWO), "--json"])
    assert ran.exit_code == 0, ran.stderr
    check_two_runs(ran.stdout)


@pytest.mark.usefixtures("forked_workers")
def test_runs_of_a_factory_from_the_command_line(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine_21.py").write_text(FACTORY)
    model = study_words("model._target_=mine_21.build", "model.width=64", *TWO)
    ran = CliRunner().invoke(app, ["run", *model, "--json"])
    assert ran.exit_code == 0, ran.stderr
    check_two_runs(ran.stdout)
