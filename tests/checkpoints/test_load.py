"""What load_checkpoint gives a model is what was saved, and a model that a checkpoint does not fit stays as it was."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny_models import equal, tiny

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.weights import load_checkpoint
from hqsweep.errors import UserError

MODELS = ["llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"]
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_folder_of_save_pretrained(model_type: str, tmp_path: Path) -> None:
    saved, model = tiny(model_type), tiny(model_type, seed=1)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not equal(saved, model)
    description = inspect_checkpoint(tmp_path)
    assert (description.kind, description.optimizer, description.problems) == ("safetensors", "none", ())
    assert (tmp_path / "model.safetensors.index.json").is_file()
    held = {id(p) for p in model.parameters()}
    loaded = load_checkpoint(tmp_path, model)
    assert equal(saved, model)
    assert held == {id(p) for p in model.parameters()}
    assert loaded.moments == 0


def test_a_tied_head_is_missing_and_stays_tied(tmp_path: Path) -> None:
    saved, model = tiny("llama", **TIED), tiny("llama", seed=1, **TIED)
    saved.save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path, model).missing == ("lm_head.weight",)
    assert equal(saved, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "step": 7},
        lambda state: {"state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {"state_dict": {f"net.{name}": value for name, value in state.items()}, "global_step": 7},
        lambda state: {k.replace(".layers.0.", ".layers.0._checkpoint_wrapped_module."): state[k] for k in state},
    ],
)  # fmt: skip
def test_a_file_of_torch_with_wrappers(wrap, tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    torch.save(wrap(saved.state_dict()), tmp_path / "a.pt")
    load_checkpoint(tmp_path / "a.pt", model)
    assert equal(saved, model)


def refused(path: Path, model: torch.nn.Module, match: str, **options) -> None:
    """The checkpoint is refused in these words, and the model stays as it was."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=match):
        load_checkpoint(path, model, **options)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_another_vocabulary(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    model = tiny("llama", vocab_size=72)
    refused(tmp_path, model, r"lm_head.weight is \[64, 32\] there and \[72, 32\] in the model: it has another vocab")


def test_another_model(tmp_path: Path) -> None:
    tiny("llama", hidden_size=40, num_attention_heads=5, num_key_value_heads=5).save_pretrained(tmp_path)
    refused(tmp_path, tiny("llama"), "it is one of another model")


def test_more_and_fewer_layers(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    refused(tmp_path, tiny("llama", num_hidden_layers=3), r"it lacks 9 of the 30 tensors of the model: model.layers.2.")
    refused(tmp_path, tiny("llama", num_hidden_layers=1), r"9 of its tensors are none of the model: model.layers.1.")


def test_a_head_of_its_own_where_the_model_ties_it(tmp_path: Path) -> None:
    tiny("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    refused(tmp_path, tiny("llama", **TIED), "ties .* and the checkpoint has two that differ")


def test_other_names_are_given_by_a_mapping(tmp_path: Path) -> None:
    saved, model = tiny("llama"), tiny("llama", seed=1)
    saved.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.replace("model.norm", "final"): v for name, v in tensors.items()}, tmp_path / "model.safetensors")
    refused(tmp_path, model, "final.weight")
    load_checkpoint(tmp_path, model, names={"final.weight": "model.norm.weight"})
    assert equal(saved, model)
    refused(tmp_path, model, "the checkpoint has no tensor 'x'", names={"x": "model.norm.weight"})


def test_hqsweeps_own_model_from_safetensors_and_torch(tmp_path: Path) -> None:
    """States of delayed scaling are no part of a checkpoint of others."""
    from hqsweep.config.model import ModelConfig
    from hqsweep.recipe import parse_recipe
    from hqsweep.train.model import GPT

    slots = dict.fromkeys(("input", "weight", "grad_output"), "fp8_delayed")
    model = GPT(ModelConfig(layers=1, dim=32, heads=2), 64, parse_recipe({"linear": slots}), torch.float32)
    plain = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    assert len(plain) < len(model.state_dict())
    save_file(plain, tmp_path / "a.safetensors")
    torch.save({"model": plain, "step": 5}, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(tmp_path / name, model)
        assert all(torch.equal(p, plain[name]) for name, p in model.named_parameters())


def test_a_model_in_wrappers(tmp_path: Path) -> None:
    """torch.compile and DataParallel around it, activation checkpointing within it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    saved, model = tiny("llama"), tiny("llama", seed=1)
    saved.save_pretrained(tmp_path)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    optimizer = torch.optim.AdamW(model.parameters())
    assert load_checkpoint(tmp_path, torch.nn.DataParallel(torch.compile(model)), optimizer).missing == ()
    model.model.layers[0] = model.model.layers[0]._checkpoint_wrapped_module
    assert equal(saved, model)


def test_a_model_without_memory(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"embed_tokens.weight is on the meta device, without memory; build the"):
        load_checkpoint(tmp_path, tiny("llama").to("meta"))


def test_weights_that_another_library_quantized(tmp_path: Path) -> None:
    saved = tiny("llama")
    state = saved.state_dict() | {"model.norm.weight": torch.zeros(32, dtype=torch.float8_e4m3fn)}
    torch.save(state, tmp_path / "a.pt")
    refused(
        tmp_path / "a.pt", saved, "model.norm.weight is held as float8_e4m3fn, by the quantization of another library"
    )


@pytest.mark.parametrize(("format", "quantized"), [("fp8_delayed", False), ("mxfp8", True)])
def test_the_state_of_a_run(format: str, quantized: bool, tmp_path: Path) -> None:
    from hqsweep.config.job import parse
    from hqsweep.train import data
    from hqsweep.train.checkpoint import save_checkpoint
    from hqsweep.train.loop import Trainer

    config = parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1,
            "recipe": {"name": "r", "linear": dict.fromkeys(("input", "weight", "grad_output"), format)},
            "model": {"dim": 32, "layers": 1, "heads": 2, "quantized_weights": quantized},
            "data": {"source": "markov", "markov": {"length": 20000}}, "stats": {"every": 0},
            "train": {"steps": 2, "batch": 2, "context": 16, "eval_batches": 1, "device": "cpu"},
        }
    )  # fmt: skip
    dataset = data.load(config.data)
    saved, other = (Trainer(config, dataset, config.recipe.build(), torch.device("cpu")) for _ in range(2))
    for _ in saved.steps():
        pass
    save_checkpoint(saved, tmp_path)
    description = inspect_checkpoint(tmp_path / "step_2.pt")
    assert (description.kind, description.step, description.optimizer, description.problems) == (
        "hqsweep",
        2,
        "indexed",
        (),
    )
    loaded = load_checkpoint(description, other.model, other.optimizer)
    pairs = list(zip(saved.model.parameters(), other.model.parameters(), strict=True))
    assert loaded.moments == len(pairs)
    assert all(torch.equal(one.dequantize(), two.dequantize()) for one, two in pairs)
    for one, two in pairs:
        there, here = saved.optimizer.state[one], other.optimizer.state[two]
        assert there.keys() == here.keys()
        assert all(torch.equal(there[key], here[key]) for key in there)
