"""load_checkpoint: the weights, and where they are there the moments, of a checkpoint of others in a model.

Everything is checked before anything is written: a model that a checkpoint does not fit stays as it was.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints import dcp, huggingface, torch_file
from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.moments import load_moments
from hqsweep.checkpoints.names import Names, Pieces, made, pieces_of, unused
from hqsweep.errors import UserError, nearest
from hqsweep.quant.delayed import DelayedState

READERS = {
    "safetensors": huggingface.read, "torch": torch_file.read, "hqsweep": torch_file.read, "dcp": dcp.read,
}  # fmt: skip
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", "freqs_cis", "rope.cache")
"""Ends of names of tensors that earlier versions of models saved and that are computed."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What load_checkpoint did. missing: tensors of the model that the checkpoint lacks, which are tied to others that
    it has; unexpected: tensors of the checkpoint that are computed or were not used; permuted: weights whose rows were
    put into the model's order; moments: how many parameters have got moments; step: the checkpoint's."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    permuted: tuple[str, ...]
    moments: int
    step: int | None


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str] | Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    names: Names = None,
) -> Loaded:
    """Copy a checkpoint into a model, in place: parameters, ties, devices and dtypes stay.

    path: what inspect_checkpoint takes, or what it returned. optimizer: gets exp_avg, exp_avg_sq and step of each
    parameter that it holds, where the checkpoint has them; its learning rates and betas stay. names: how the checkpoint
    names tensors: "hf", "torchtitan", or a mapping of its names to the model's; None finds out.

    Raises UserError before anything is written: for half a checkpoint, other names or shapes than the model's, tensors
    that the model ties and the checkpoint has twice, moments that are not Adam's or cannot be told apart.
    """
    checkpoint = path if isinstance(path, Checkpoint) else inspect_checkpoint(path)
    checkpoint.check()
    tensors = READERS[checkpoint.kind](checkpoint)
    wanted, config = own_state(model), _config(model)
    pieces = pieces_of(names, tensors.keys(), wanted.keys(), config)
    state, left = _made(pieces, tensors, checkpoint), unused(pieces, tensors)
    if config is not None and _strange(state, wanted):
        state, left = _through_transformers(model, state, checkpoint), []
    missing = _check(checkpoint, state, wanted, model)
    computed = [name for name in state if name not in wanted]
    values = {name: value for name, value in state.items() if name in wanted}
    write_moments, moments = load_moments(checkpoint, model, optimizer, pieces, values) if optimizer else (None, 0)
    model.load_state_dict(values, strict=False)
    if write_moments:
        write_moments()
    permuted = tuple(name for name, piece in pieces.items() if piece.permuted)
    return Loaded(
        missing=tuple(missing),
        unexpected=(*left, *computed),
        permuted=permuted,
        moments=moments,
        step=checkpoint.step,
    )


def check_fits(checkpoint: Checkpoint, model: nn.Module) -> None:
    """UserError for the names and shapes for which load_checkpoint would refuse a checkpoint; no tensor is read, and
    the model may be on the meta device. Names that only transformers knows, as of experts that are saved one by one,
    are taken as right."""
    checkpoint.check()
    tensors = {name: torch.empty(shape, device="meta") for name, (shape, _) in checkpoint.tensors.items()}
    wanted, config = own_state(model), _config(model)
    state = _made(pieces_of(None, tensors.keys(), wanted.keys(), config), tensors, checkpoint)
    if config is None or not _strange(state, wanted):
        _check(checkpoint, state, wanted, model)
        return
    for name, value in state.items():
        if name in wanted and value.shape != wanted[name].shape:
            _refuse_shape(checkpoint, name, tuple(value.shape), tuple(wanted[name].shape))


def _config(model: nn.Module) -> Any:
    """The config of a Hugging Face model; None of other models."""
    return getattr(model, "config", None) if hasattr(model, "from_pretrained") else None


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint of the plain model holds, by name: without states of delayed
    scaling."""
    leads = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, DelayedState))
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: value for name, value in held.items() if not (leads and name.startswith(leads))}


def _made(pieces: Pieces, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    try:
        return {name: made(piece, tensors) for name, piece in pieces.items()}
    except KeyError as error:
        raise UserError(f"{checkpoint.path}: it lacks the tensor {error}") from None
    except RuntimeError as error:
        raise UserError(f"{checkpoint.path}: its tensors have not the shapes of the model ({error})") from None


def _strange(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether names are not those of a model's state_dict; a Hugging Face model may be saved by other ones."""
    return any(name not in wanted and not name.endswith(COMPUTED) for name in state)


def _through_transformers(model: nn.Module, state: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state_dict that transformers makes of saved names, such as of experts that are saved one by one."""
    with silent():
        made, told = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
        )
    if told["unexpected_keys"]:
        _refuse_strange(checkpoint, sorted(told["unexpected_keys"]), made.state_dict())
    if told["mismatched_keys"]:
        name, theirs, ours = sorted(told["mismatched_keys"])[0]
        _refuse_shape(checkpoint, name, tuple(theirs), tuple(ours))
    lacking = set(told["missing_keys"])
    return {name: value for name, value in made.state_dict().items() if name not in lacking}


@contextmanager
def silent() -> Iterator[None]:
    """Without the table and the progress bars of transformers: what it says is an error of ours, or nothing."""
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def _check(checkpoint: Checkpoint, state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], model: nn.Module) -> list:
    """UserError unless the tensors are those of the model; returns what is missing as it is tied to what is there."""
    strange = [name for name in state if name not in wanted and not name.endswith(COMPUTED)]
    if strange:
        _refuse_strange(checkpoint, strange, wanted)
    groups = _tied(model, wanted)
    missing = [name for name in wanted if name not in state]
    lacking = [name for name in missing if not any(other in state for other in groups[name])]
    if lacking:
        raise UserError(
            f"{checkpoint.path}: it lacks {len(lacking)} of the {len(wanted)} tensors of the model:"
            f" {first_names(lacking)}; give the checkpoint of this model"
        )
    for name, value in state.items():
        if name in wanted and value.shape != wanted[name].shape:
            _refuse_shape(checkpoint, name, tuple(value.shape), tuple(wanted[name].shape))
    for name in state:
        for other in groups.get(name, ()):
            if other in state and other != name and not _equal(state[name], state[other]):
                raise UserError(
                    f"{checkpoint.path}: the model ties {name} and {other}, and the checkpoint has two that differ;"
                    " give tie_word_embeddings: false in the model's config.json"
                )
    return missing


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same; of the meta device they may."""
    return a.is_meta or torch.equal(a, b)


def _tied(model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Name -> the names of all that are one parameter with it."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    groups = {name: group for group in by_parameter.values() for name in group}
    return {name: groups.get(name, [name]) for name in wanted}


def _refuse_strange(checkpoint: Checkpoint, strange: list[str], wanted: Mapping[str, Any]) -> None:
    raise UserError(
        f"{checkpoint.path}: {len(strange)} of its tensors are none of the model: {first_names(strange)}"
        f"{nearest(strange[0], wanted)}; give the checkpoint of this model"
    )


def _refuse_shape(checkpoint: Checkpoint, name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    vocabulary = "embed" in name or "lm_head" in name or name.startswith("head.")
    why = "it has another vocabulary" if vocabulary and theirs[1:] == ours[1:] else "it is one of another model"
    raise UserError(f"{checkpoint.path}: {name} is {list(theirs)} there and {list(ours)} in the model: {why}")
