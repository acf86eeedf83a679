"""What save_model writes is read again, by load_checkpoint and by the libraries that it is written for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints.tiny_models import equal, tiny
from torch import nn

from hqsweep.checkpoints.weights import load_checkpoint, save_model
from hqsweep.errors import UserError
from hqsweep.models.convert import convert, revert


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt_oss"])
def test_a_converted_model_of_hugging_face(model_type: str, tied: bool, tmp_path: Path) -> None:
    """The files are those of the plain model, byte by byte."""
    from transformers import AutoModelForCausalLM

    model = tiny(model_type, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "plain")
    convert(model, "format:mxfp8", experts=False, head=not tied)
    save_model(model, tmp_path / "saved")
    revert(model)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert all((tmp_path / "plain" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes() for name in names)
    assert equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32))


class Tied(nn.Module):
    """A user's model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize("name", ["a.safetensors", "folder"])
def test_a_users_own_model(name: str, tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    model.scale.fill_(3.0)
    file = save_model(torch.compile(model), tmp_path / name)
    assert load_file(file).keys() == {"embedding.weight", "scale"}
    load_checkpoint(tmp_path / name, other)
    assert equal(model, other)
    assert other.head.weight is other.embedding.weight
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_hqsweeps_own_model_with_quantized_weights(recipe: str, tmp_path: Path) -> None:
    """They are written as what they stand for, and loaded into a model that quantizes them or not."""
    from hqsweep.config.model import ModelConfig
    from hqsweep.nn import quantized_model_init
    from hqsweep.recipe import parse_recipe
    from hqsweep.train.model import GPT

    def gpt() -> GPT:
        slots = parse_recipe({"linear": dict.fromkeys(("input", "weight", "grad_output"), recipe)})
        return GPT(ModelConfig(layers=1, dim=32, heads=2), 64, slots, torch.float32)

    with quantized_model_init():
        held, again = gpt(), gpt()
    plain = gpt()
    save_model(held, tmp_path / "a.safetensors")
    for model in (plain, again):
        load_checkpoint(tmp_path / "a.safetensors", model)
        there = dict(model.named_parameters())
        assert all(torch.equal(p.dequantize(), there[name].dequantize()) for name, p in held.named_parameters())


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine").write_text("mine")
    for model in (Tied(), tiny("llama")):
        with pytest.raises(UserError, match="folder' is there already; give a folder that is new or empty"):
            save_model(model, tmp_path / "folder")
    with pytest.raises(UserError, match=r"a\.safetensors' is there already"):
        save_model(Tied(), tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_text() == (tmp_path / "folder/mine").read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="No space"):
        save_model(model, tmp_path / "folder")
    assert not list(tmp_path.iterdir())
