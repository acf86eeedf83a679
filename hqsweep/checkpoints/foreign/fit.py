"""Whether the tensors of a checkpoint are those of a model; what does not fit is refused by its name."""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hqsweep.checkpoints.foreign.checkpoint import Checkpoint, first_names
from hqsweep.errors import UserError, nearest
from hqsweep.models.names import clean_name

COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", "freqs_cis", "rope.cache")
"""Ends of names of tensors that earlier versions of models saved and that are computed."""


def check_model(model: nn.Module) -> None:
    """UserError for a model into which nothing can be copied."""
    distributed = sys.modules.get("torch.distributed.tensor")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(
                f"load_checkpoint: {name} is on the meta device, without memory; build the model on a device"
            )
        if (distributed and isinstance(parameter, distributed.DTensor)) or hasattr(parameter, "ds_id"):
            raise UserError(f"load_checkpoint: {name} is sharded; load the checkpoint first, then shard")


def _is_quantized(value: Tensor, wanted: Tensor) -> bool:
    return wanted.is_floating_point() and not (value.is_floating_point() and value.itemsize >= 2)


def check_tensors(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], model: nn.Module
) -> list:
    """UserError unless the tensors are those of the model; returns what is missing as it is tied to what is there."""
    strange = [name for name in state if name not in wanted and not name.endswith(COMPUTED)]
    if strange:
        refuse_strange(checkpoint, strange, wanted)
    held_otherwise = [name for name, value in state.items() if name in wanted and _is_quantized(value, wanted[name])]
    if held_otherwise:
        name = held_otherwise[0]
        raise UserError(
            f"{checkpoint.path}: {name} is held as {str(state[name].dtype).removeprefix('torch.')}, by the quantization"
            " of another library; give the checkpoint in float32 or bf16"
        )
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
            refuse_shape(checkpoint, name, tuple(value.shape), tuple(wanted[name].shape))
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
        by_parameter.setdefault(id(parameter), []).append(clean_name(name))
    groups = {name: group for group in by_parameter.values() for name in group}
    return {name: groups.get(name, [name]) for name in wanted}


def refuse_strange(checkpoint: Checkpoint, strange: list[str], wanted: Mapping[str, Tensor]) -> None:
    raise UserError(
        f"{checkpoint.path}: {len(strange)} of its tensors are none of the model: {first_names(strange)}"
        f"{nearest(strange[0], wanted)}; give the checkpoint of this model"
    )


def refuse_shape(checkpoint: Checkpoint, name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
    vocabulary = "embed" in name or "lm_head" in name or name.startswith("head.")
    why = "it has another vocabulary" if vocabulary and theirs[1:] == ours[1:] else "it is one of another model"
    raise UserError(f"{checkpoint.path}: {name} is {list(theirs)} there and {list(ours)} in the model: {why}")
