"""Models of any kind on samples of a Python function: packing, order, losses, the trial before the start, and runs."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from hqsweep.cli.main import app
from hqsweep.config.train import FactoryDataConfig
from hqsweep.errors import UserError
from hqsweep.models.batches import BatchLoss, Packing, batch_loss
from hqsweep.models.hf import load_model
from hqsweep.recipe.factories import Importer
from hqsweep.sweep.engine.launch import plan
from hqsweep.train.batches import load_batches

MINE = """
import torch
import torch.nn.functional as F
from torch import nn

class Images:
    def __init__(self, count, seed, named):
        drawn = torch.Generator().manual_seed(seed)
        self.labels, self.named = torch.randint(0, 4, (count,), generator=drawn), named
        self.images = torch.randn(count, 3, 8, 8, generator=drawn) + self.labels[:, None, None, None]
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, i):
        image = self.images[i] + 0.01 * torch.randn(())  # an augmentation
        return {"pixel_values": image, "labels": self.labels[i]} if self.named else (image, self.labels[i])

def images(count=64, named=True):
    return Images(count, 1, named), Images(16, 2, named)

def ragged():
    return [torch.zeros(3 + i % 2) for i in range(20)], [torch.zeros(3)] * 4

def empty():
    return [], []

def one():
    return torch.zeros(4)

class Sequences:
    def __init__(self, seed):
        self.tokens = torch.randint(2, 90, (32, 16), generator=torch.Generator().manual_seed(seed))
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i].flip(0)}

def sequences():
    return Sequences(1), Sequences(2)

class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Linear(48, 32), nn.Linear(32, 32), nn.Linear(32, 4)
    def forward(self, x):
        x = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.out(F.relu(self.hidden(F.relu(self.embed(x)))).mean(1))

class Denoiser(Patches):
    def loss(self, batch):
        return self(batch["pixel_values"]).square().mean()

def vit():
    import transformers
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=4,
        num_labels=4))

def t5():
    import transformers
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0))

def bert():
    import transformers
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64))

def masked(model, batch):
    tokens, _ = batch
    hidden = torch.rand(tokens.shape, device=tokens.device) < 0.5
    logits = model(input_ids=tokens.masked_fill(hidden, 1)).logits.float()
    return F.cross_entropy(logits[hidden], tokens[hidden])

def flat(model, batch):
    return torch.zeros(())

def names(model, batch):
    return "no loss"
"""
BASE = (
    "conf=convergence", "track=none", "train.steps=4", "train.batch=8", "train.context=32", "train.eval_batches=1",
    "train.device=cpu", "recipe=bf16,mxfp8", "stats.every=2", "engine.workers=1",
)  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    """The name of a module in ./conf of the working directory; another one in each test, as modules stay imported."""
    name = f"mine_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return name


def section(function, **keys) -> FactoryDataConfig:
    given = {"_target_": "my.data", **keys}
    return FactoryDataConfig.model_validate(given, context={"find": lambda path, where: function})


def test_a_batch_of_any_nest_becomes_bytes_and_comes_back() -> None:
    batch = {
        "image": torch.randn(3, 2, 5), "more": [torch.arange(3), (torch.rand(3, 4) > 0.5, torch.randn(3).bfloat16())]
    }  # fmt: skip
    packing = Packing.of(batch)
    rows = packing.pack(batch)
    assert rows.dtype is torch.uint8 and rows.shape == (3, 2 * 5 * 4 + 8 + 4 + 2)
    back = packing.unpack(rows)
    assert torch.equal(back["image"], batch["image"]) and torch.equal(back["more"][0], batch["more"][0])
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(back["more"][1], batch["more"][1], strict=True))
    assert torch.equal(packing.unpack(rows[1:2])["image"], batch["image"][1:2]), "a part of a batch is a batch"
    assert packing.unpack(rows.to("meta"))["more"][1][1].dtype is torch.bfloat16
    with pytest.raises(
        UserError, match=r"field image of a sample is float32 \[5\], and of the first one float32 \[2, 5"
    ):
        packing.pack(batch | {"image": torch.randn(3, 5)})
    with pytest.raises(UserError, match="samples have different fields"):
        packing.pack({"image": batch["image"]})
    with pytest.raises(UserError, match=r"name is str; samples are tensors"):
        Packing.of({"name": "a"})


def test_an_epoch_reads_each_sample_once_and_a_batch_depends_on_seed_and_step_alone() -> None:
    def numbers():
        return list(range(12)), np.arange(5)

    dataset = load_batches(section(numbers))

    def read(split, seed, step, count):
        return dataset.packing.unpack(dataset.batch(split, seed, step, count, 1)[0]).tolist()

    epoch = [read("train", 3, step, 4) for step in range(3)]
    order = [number for batch in epoch for number in batch]
    assert sorted(order) == list(range(12)) and order != list(range(12))
    assert [read("train", 3, step, 4) for step in range(3)] == epoch
    assert [read("train", 4, step, 4) for step in range(3)] != epoch and read("train", 3, 3, 4) != epoch[0]
    assert sorted(read("val", 0, 0, 5)) == [0, 1, 2, 3, 4] and read("val", 1, 0, 5) == read("val", 9, 0, 5)
    assert dataset.hash == load_batches(section(numbers)).hash
    assert dataset.hash != load_batches(section(lambda: (list(range(13)), np.arange(5)))).hash


def test_random_numbers_of_samples_repeat_and_leave_the_generators(mine, tmp_path) -> None:
    class Noise:
        def __len__(self):
            return 4

        def __getitem__(self, place):
            return torch.rand(2) + float(np.random.rand())

    dataset = load_batches(section(lambda: (Noise(), Noise())))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two = (dataset.batch("train", 0, 5, 4, 1)[0] for _ in range(2))
    assert torch.equal(one, two) and torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one, dataset.batch("train", 0, 6, 4, 1)[0])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: 3, r"gave int; it must give \(train, val\)"),
        (lambda: ([], [1.0]), "gave no samples as train"),
        (lambda: (iter([1.0]), [1.0]), r"gave list_iterator as train; it must have len\(\) and \[i\]"),
        (lambda: {"train": [1.0]}, r"gave dict; it must give \(train, val\)"),
        (lambda: ([1.0], [2]), "a sample is int64"),
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_data_that_cannot_be_read_is_refused(given, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        load_batches(section(given))


def test_the_loss_is_the_function_s_the_model_s_or_the_cross_entropy() -> None:
    class Two(nn.Linear):
        def loss(self, batch):
            return self(batch[0]).square().mean(), torch.ones(())

    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    plain = nn.Linear(5, 3)
    assert batch_loss(plain, (x, y))[0].item() == pytest.approx(nn.functional.cross_entropy(plain(x), y).item())
    loss, aux = batch_loss(two := Two(5, 3), (x, y))
    assert loss.item() == two(x).square().mean().item() and aux.item() == 1
    assert batch_loss(two, (x, y), lambda model, batch: batch[0].sum())[0].item() == x.sum().item()
    for batch, sentence in ((x, "for a batch of Tensor"), ((x, x), "no int64 classes"), ((x, y[:3]), r"gave \(6, 3\)")):
        with pytest.raises(UserError, match=sentence):
            batch_loss(plain, batch)
    BatchLoss(packing=(packing := Packing.of((x, y)))).attach(plain)
    from hqsweep.models.head_loss import model_loss

    rows = packing.pack((x, y))
    assert torch.equal(model_loss(plain, rows, rows[:, :0])[0], batch_loss(plain, (x, y))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("model._target_=MINE.vit", "data._target_=MINE.images"),
        ("model._target_=MINE.Patches", "data._target_=MINE.images", "data.named=false"),
        ("model._target_=MINE.Denoiser", "data._target_=MINE.images", "data.count=32"),
        ("model._target_=MINE.t5", "data._target_=MINE.sequences"),
        ("model._target_=MINE.bert", "model.loss=MINE.masked", "data=markov"),
    ],
)
def test_a_dry_run_takes_classifiers_encoders_and_encoder_decoders(words, mine) -> None:
    ran = CliRunner().invoke(app, ["run", *BASE, *(word.replace("MINE", mine) for word in words), "--dry-run"])
    assert ran.exit_code == 0 and "2 to do" in ran.stdout and not Path("runs").exists(), ran.output
    assert f"importing {mine} for model._target_" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("model._target_=MINE.Patches", "data._target_=MINE.images"),
            r"Patches raised TypeError for a batch of pixel_v",
        ),
        (
            ("model._target_=MINE.vit", "data._target_=MINE.sequences"),
            r"ViTForImageClassification raised AttributeError",
        ),
        (("model._target_=MINE.vit", "data._target_=MINE.ragged"), r"data._target_: a batch of samples .* equal size"),
        (("model._target_=MINE.vit", "data._target_=MINE.empty"), r"MINE.empty gave no samples as train"),
        (("model._target_=MINE.vit", "data._target_=MINE.one"), r"MINE.one gave Tensor; it must give \(train, val\)"),
        (("model._target_=MINE.bert", "model.loss=MINE.flat"), r"loss of BertForMaskedLM has no gradient"),
        (("model._target_=MINE.bert", "model.loss=MINE.names"), r"model.loss: names gave str; it must give a loss"),
        (("data._target_=MINE.images",), r"hqsweep's own GPT takes tokens"),
    ],
)
def test_a_dry_run_refuses_what_the_first_step_would(words, sentence, mine) -> None:
    ran = CliRunner().invoke(app, ["run", *BASE, *(word.replace("MINE", mine) for word in words), "--dry-run"])
    assert ran.exit_code == 2 and not Path("runs").exists(), ran.output
    with pytest.raises(AssertionError, match=sentence.replace("MINE", mine)):
        raise AssertionError(ran.stderr)


@pytest.mark.slow
def test_a_dry_run_imports_nothing_that_a_file_names_alone(mine) -> None:
    Path("study.yaml").write_text(
        f"defaults: [convergence, _self_]\nmodel: {{_target_: {mine}.vit}}\ndata: {{_target_: {mine}.images}}\n"
    )
    words = ["run", "conf=study.yaml", *BASE[1:], "--dry-run"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0 and mine not in sys.modules, ran.output
    refused = CliRunner().invoke(app, ["run", *BASE, f"model._target_={mine}.vit", "--dry-run", "--no-import"])
    assert refused.exit_code == 0 and mine not in sys.modules, refused.output


@pytest.mark.slow
def test_the_architecture_of_config_json_is_taken_where_it_is_asked_for(mine, tmp_path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location(mine, tmp_path / "conf" / f"{mine}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.vit().save_pretrained("vit")
    loaded = load_model("vit", architecture="own")
    assert type(loaded).__name__ == "ViTForImageClassification" and loaded.training
    words = [*BASE, "model=hf", "model.path=vit", f"data._target_={mine}.images"]
    importer = Importer(lambda line: None)
    assert len(plan([*words, "model.architecture=own"], importer=importer).points) == 2
    with pytest.raises(UserError, match=r"model.path: 'vit/config.json' \(vit\): "):
        plan(words, importer=importer)
    (config := Path("vit/config.json")).write_text(config.read_text().replace("ViTForImage", "Nothing"))
    with pytest.raises(
        UserError, match="names 'NothingClassification' in `architectures`, which transformers does not"
    ):
        load_model("vit", architecture="own")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_classifier_is_trained_and_compared_from_the_command_line(mine) -> None:
    words = [*BASE, f"model._target_={mine}.Patches", f"data._target_={mine}.images", "data.named=false"]
    command = ["run", *words, "sweep=patches", "--json"]
    ran, again = (CliRunner().invoke(app, [*command, *more]) for more in ([], ["--force"]))
    assert ran.exit_code == again.exit_code == 0, ran.output + again.output
    results = json.loads(ran.stdout)
    assert [result["state"] for result in results] == ["finished"] * 2
    assert results[0]["val_loss"] != results[1]["val_loss"]
    assert [result["val_loss"] for result in json.loads(again.stdout)] == [result["val_loss"] for result in results]
    compared = CliRunner().invoke(app, ["compare", "patches", "--json"])
    assert compared.exit_code == 0, compared.output
