"""GGUF files and single files of weights as model.path: config, weights, tokenizer, and what is refused."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.models.tiny import tiny
from support.models.tiny_gguf import WORDS, write_gguf

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.user_model import check_files, model_digest
from hqsweep.config.model import HFModelConfig
from hqsweep.errors import UserError
from hqsweep.models.hf import load_model
from hqsweep.models.hf_folder import gguf_folder, read_hf_config
from hqsweep.shards.tokenizer import open_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HQSWEEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def section(path: Path) -> HFModelConfig:
    return HFModelConfig(kind="hf", path=str(path))


def test_a_gguf_file_gives_its_weights_config_and_tokenizer(tmp_path, cache, capfd):
    saved = write_gguf(file := tmp_path / "tiny.gguf").state_dict()
    loaded = load_model(file).state_dict()
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    config = check_files(section(file))
    assert (config.context, config.vocab_size, config.model_type) == (128, 96, "llama")
    assert open_tokenizer(file).encode("abcd").ids == [WORDS.index("ab"), WORDS.index("cd")]
    assert inspect_checkpoint(file).parameters == sum(value.numel() for value in saved.values())
    assert len(list((cache / "gguf").glob("[!.]*"))) == 1 and capfd.readouterr().err.count("read once") == 1


def test_the_digest_is_of_the_content_of_the_file(tmp_path):
    write_gguf(file := tmp_path / "tiny.gguf")
    shutil.copy(file, tmp_path / "copy.gguf")
    digest = model_digest(section(file))
    assert digest == model_digest(section(tmp_path / "copy.gguf"))
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    assert model_digest(section(file)) != digest


def test_wrong_files_get_one_sentence(tmp_path, cache, monkeypatch):
    write_gguf(file := tmp_path / "tiny.gguf")
    write_gguf(other := tmp_path / "other.gguf", "unheard_of")
    (text := tmp_path / "text.gguf").write_text("no model")
    (cut := tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-1000])
    (headless := tmp_path / "headless.gguf").write_bytes(file.read_bytes()[:100])
    sentences = {
        text: r"is not a GGUF file: it does not begin with GGUF",
        tmp_path / "gone.gguf": r"cannot be read \(No such file",
        cut: r"is cut short or damaged at [\d,]+ bytes .*; copy it again",
        headless: r"is cut short or damaged at 100 bytes",
        other: r"cannot read .*other.gguf' \(GGUF model with architecture unheard_of is not supported yet\); give",
    }
    for path, sentence in sentences.items():
        with pytest.raises(UserError, match=sentence) as raised:
            read_hf_config(path)
        assert str(raised.value).startswith("model.path: ") and "\n" not in str(raised.value)
    assert not list((cache / "gguf").glob("[!.]*")), "a folder of half a model"
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("hqsweep.models.hf_folder.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(UserError, match=r"needs the package gguf; pip install 'hqsweep\[models\]'"):
        gguf_folder(file)


def test_a_file_of_safetensors_takes_the_config_beside_it(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with torch.no_grad():
        (other := tiny("llama")).lm_head.weight.mul_(2)
    other.save_pretrained(tmp_path / "other")
    one = shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "best.safetensors")
    for file, model in ((tmp_path / "model.safetensors", tiny("llama")), (one, other)):
        check_files(section(file))
        assert torch.equal(load_model(file).lm_head.weight, model.lm_head.weight)
        assert model_digest(section(file)) != model_digest(section(tmp_path / "other"))
    part = shutil.copy(one, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match="is one of several files of weights; give their folder"):
        load_model(part)
    alone = shutil.copy(one, (tmp_path / "cache_less").mkdir() or tmp_path / "cache_less" / "best.safetensors")
    with pytest.raises(UserError, match="is a checkpoint, and does not say of which model"):
        load_model(alone)
