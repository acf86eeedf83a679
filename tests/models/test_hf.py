"""Hugging Face models: what their configs say, how they are loaded, and their loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.models.tiny import VOCABULARY, tiny, tokens

import hqsweep
from hqsweep.errors import UserError
from hqsweep.models.hf import causal_lm_loss, load_model, meta_model
from hqsweep.models.hf_folder import read_hf_config

KINDS = ("llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        tiny(kind).save_pretrained(root / kind)
    return root


def spoiled(folder: Path, to: Path, change) -> Path:
    """A copy of the folder whose tensors `change` has changed."""
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_folder_in_float32(kind, folders):
    model, saved = load_model(folders / kind), tiny(kind).state_dict()
    loaded = model.state_dict()
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert {n: p.shape for n, p in meta_model(read_hf_config(folders / kind)).state_dict().items()} == {
        n: p.shape for n, p in saved.items()
    }


def test_random_weights_are_the_seed_s_and_the_caller_s_numbers_stay(folders):
    torch.manual_seed(5)
    one, two, other = (load_model(folders / "llama" / "config.json", pretrained=False, seed=s) for s in (3, 3, 4))
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_not_shifted_twice(kind, folders):
    """targets are given shifted; the loss that a model would shift itself is of others."""
    model, ids = load_model(folders / kind).eval(), tokens(3, 17)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    loss, aux = causal_lm_loss(model, inputs, targets)
    logits = model(input_ids=inputs).logits.float()
    assert loss.item() == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-6)
    assert loss.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-4) and aux is None


def test_the_auxiliary_loss_of_a_mixture_is_apart():
    model, ids = tiny("mixtral", output_router_logits=True), tokens(2, 17)
    loss, aux = causal_lm_loss(model, ids[:, :-1], ids[:, 1:])
    out = model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous())
    assert aux.item() == pytest.approx(model.router_aux_loss_coef * out.aux_loss.item())
    assert (loss + aux).item() == pytest.approx(out.loss.item(), rel=1e-6) and aux.requires_grad


def test_what_a_config_says(folders, tmp_path):
    config = read_hf_config(folders / "llama")
    assert (config.vocab_size, config.context, config.tied, config.dropout) == (VOCABULARY, 128, False, False)
    gpt2 = read_hf_config(folders / "gpt2" / "config.json")
    assert gpt2.context == 128 and gpt2.model_type == "gpt2"
    nested = {"model_type": "x", "text_config": {"vocab_size": 7, "n_ctx": 9, "tie_word_embeddings": True, "drop": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    config = read_hf_config(tmp_path)
    assert (config.vocab_size, config.context, config.tied, config.dropout) == (7, 9, True, True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.norm.weight"), r"the weights in '.*' lack model.norm.weight; they are not those of"),
        (
            lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
            r"have, and the model has not, model.extra.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(2)}),
            r"have other shapes of model.norm.weight; they are",
        ),
    ],
)
def test_weights_of_another_model_are_refused(change, sentence, folders, tmp_path):
    with pytest.raises(UserError, match=sentence) as raised:
        load_model(spoiled(folders / "llama", tmp_path, change))
    assert "\n" not in str(raised.value)


def test_what_cannot_be_loaded_is_refused(folders, monkeypatch):
    with pytest.raises(UserError, match=r"dtype got 'float8'; must be one of float32"):
        load_model(folders / "llama", dtype="float8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"needs the package transformers; pip install 'hqsweep\[models\]'"):
        load_model(folders / "llama")


def test_configs_are_read_without_torch_and_models_are_loaded_lazily(folders):
    assert hqsweep.load_model is load_model
    code = (
        "import sys; from hqsweep.models.hf_folder import read_hf_config; read_hf_config(sys.argv[1]);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folders / "llama")], check=False).returncode == 0
