"""Checks of a user's model before torch is imported: its files are there, whole, and fit the data."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.config.model import HFModelConfig
from hqsweep.config.train import DataConfig, TrainConfig, data_kind
from hqsweep.errors import UserError
from hqsweep.models.hf_folder import HFConfig, gguf_digest, is_gguf, read_hf_config

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""The ends of embeddings' names, by families of models."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""How names of output projections end."""
KNOWN_VOCABULARY = ("stdlib", "site", "text", "markov")
"""Sources of data that know their number of tokens before they are read."""
_HASHES: dict[tuple[Any, ...], str] = {}


def check_model_files(config: Mapping[str, Any]) -> None:
    """UserError for a Hugging Face model whose files are missing or half written. UserError, too, for one that takes
    fewer positions or tokens than the data needs. `config` has passed check_keys. torch is not imported."""
    section = config.get("model")
    if not isinstance(section, Mapping) or section.get("kind") != "hf":
        return
    context, vocab_size = TrainConfig.model_validate(config.get("train", {})).context, None
    if data_kind(config.get("data")) == "tokens":
        data = DataConfig.model_validate(config.get("data", {}))
        vocab_size = data.vocab_estimate if data.source in KNOWN_VOCABULARY else None
    check_fits(check_files(HFModelConfig.model_validate(section)), context, vocab_size)


def check_files(model: HFModelConfig) -> HFConfig:
    """Return the config of a model whose files exist and match, as far as their headers show. UserError otherwise."""
    config = read_hf_config(model.path)
    if not model.pretrained:
        return config
    if config.path == Path(model.path):
        raise UserError(
            f"model.path: '{model.path}' is a config alone; give the folder that has the weights too, or"
            " model.pretrained=false for random ones"
        )
    checkpoint = weights_of(model)
    _check_vocabulary(config, checkpoint)
    return config


def weights_of(model: HFModelConfig) -> Checkpoint:
    """The weights of a model. UserError where they are missing or incomplete."""
    try:
        checkpoint = inspect_checkpoint(model.path)
        checkpoint.check()
    except UserError as error:
        raise UserError(f"model.path: {error} (model.pretrained=false begins with random weights)") from None
    return checkpoint


def model_digest(model: HFModelConfig) -> str:
    """SHA-256, in hex, of a model's config and of the weights that are read. Files that stayed as they were are read
    once a process."""
    config = read_hf_config(model.path)
    if not model.pretrained:
        return config.digest
    if is_gguf(model.path):
        return hashlib.sha256(f"gguf {gguf_digest(model.path)}".encode()).hexdigest()
    checkpoint = weights_of(model)
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.files]
    key = (config.digest, *stats)
    if key not in _HASHES:
        _HASHES[key] = hashlib.sha256(f"{config.digest} {checkpoint.sha256}".encode()).hexdigest()
    return _HASHES[key]


def check_same(model: HFModelConfig) -> None:
    """UserError where the model is another than it was when its run was planned."""
    if model.hash is not None and model_digest(model) != model.hash:
        raise UserError(
            f"model.path: '{model.path}' is another model than it was when this run was planned; give that one, or give"
            " the sweep's command again, which makes runs of the new one"
        )


def check_fits(config: HFConfig, context: int, vocab_size: int | None) -> None:
    """UserError where a model takes fewer positions than train.context, or fewer tokens than the data has (None: not
    known yet)."""
    if config.context is not None and config.context < context:
        raise UserError(
            f"train.context: {context}, but the model of '{config.path}' takes {config.context} positions; lower it"
        )
    if vocab_size is not None and config.vocab_size is not None and config.vocab_size < vocab_size:
        raise UserError(
            f"model.path: the data has {vocab_size} tokens, but the model of '{config.path}' knows {config.vocab_size}"
            " (vocab_size); give the data that its tokenizer made (hqsweep data prepare), or another model"
        )


def check_weights(model: HFModelConfig, shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]) -> None:
    """Raise UserError if the weights do not have the names and shapes of a model's tensors.

    `tied` maps a name to another one that replaces it. A family whose saved names differ from its state_dict is checked
    when it is loaded.
    """
    checkpoint = weights_of(model)
    for name, (shape, _) in checkpoint.tensors.items():
        if name in shapes and shapes[name] != shape:
            raise UserError(
                f"model.path: {name} is {list(shape)} in '{model.path}', but {list(shapes[name])} by its config.json;"
                " give the config that the weights were made with"
            )
    lacking = [name for name in shapes if name not in checkpoint.tensors and name not in tied]
    if lacking and all(name in shapes for name in checkpoint.tensors):
        raise UserError(
            f"model.path: the weights in '{model.path}' lack {first_names(lacking)}: half a checkpoint, or one of"
            " another model"
        )


def _check_vocabulary(config: HFConfig, checkpoint: Checkpoint) -> None:
    """Raise UserError if weights and config.json differ in the vocabulary, or in having a separate output
    projection."""
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = checkpoint.tensors
    heads = [name for name in tensors if name.endswith(HEADS)]
    for name in [name for name in tensors if name.endswith(EMBEDDINGS)] + heads:
        rows = tensors[name][0][0]
        if config.vocab_size is not None and rows != config.vocab_size:
            raise UserError(
                f"model.path: {name} in '{config.folder}' has {rows} rows, but {config.path.name} says vocab_size"
                f" {config.vocab_size}; give the config that the weights were made with"
            )
    if config.tied is False and not heads and any(name.endswith(EMBEDDINGS) for name in tensors):
        raise UserError(
            f"model.path: {config.path.name} in '{config.folder}' says tie_word_embeddings=false, but the weights have"
            f" no output projection ({first_names(HEADS)}): half a checkpoint, or its embedding serves for both"
            " (tie_word_embeddings=true)"
        )
