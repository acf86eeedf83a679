"""The weights of a model from and to checkpoints of other programs: load_checkpoint and save_model.

load_checkpoint puts the weights of another program's checkpoint into a model, and the moments where it has some.
Everything is checked before anything is written: a model that a checkpoint does not fit is not changed. The error names
the tensor that does not fit.

save_model writes weights under the plain model's own names, as other programs read them.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hqsweep.checkpoints import dcp, huggingface, torch_file
from hqsweep.checkpoints.checkpoint import Checkpoint, first_names
from hqsweep.checkpoints.huggingface import WEIGHTS
from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.checkpoints.moments import load_moments
from hqsweep.checkpoints.names import Names, Pieces, joined, pieces_of, unused
from hqsweep.errors import UserError, nearest
from hqsweep.models.hf_folder import quietly
from hqsweep.nn.core.module import PARTS
from hqsweep.parallel.wire.collectives import by_first, rank_in
from hqsweep.parallel.wire.local import is_spread, local, spread_like, whole_tensor
from hqsweep.quant.delayed import DelayedState
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer, ProjectedQuantizer
from hqsweep.quant.serialize import save_safetensors
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import clean_name
from hqsweep.torch_private import COMPILED_FROM

READERS = {
    "safetensors": huggingface.read, "torch": torch_file.read, "hqsweep": torch_file.read, "dcp": dcp.read,
}  # fmt: skip

PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
STATES = (".history", ".amax", "._extra_state")
"""The ends of names in the state of a run that belong to delayed scaling."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The result of load_checkpoint.

    missing: tensors of the model that the checkpoint lacks, tied to others that it has. unexpected: tensors of the
    checkpoint that are computed or were not used. permuted: weights whose rows were put into the model's order.
    moments: the number of parameters with loaded moments. step: the checkpoint's.
    """

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
    """Copy a checkpoint into a model, in place: parameters, ties, devices and dtypes do not change.

    path: a path for inspect_checkpoint, or its result. optimizer: gets exp_avg, exp_avg_sq and step of each parameter
    that it holds, where the checkpoint has them; its learning rates and betas do not change. names: how the checkpoint
    names tensors: "hf", "torchtitan", or a mapping of its names to the model's; None finds out.

    Raises UserError before anything is written: for half a checkpoint; for other names or shapes than the model's; for
    tensors that the model ties and the checkpoint has twice; for moments that are not Adam's or are ambiguous.
    """
    checkpoint = path if isinstance(path, Checkpoint) else inspect_checkpoint(path)
    checkpoint.check()
    model = unwrapped(model)
    check_model(model)
    actual = {clean_name(name): name for name in own_state(model)}
    wanted = {clean_name(name): value for name, value in own_state(model).items()}
    tensors = READERS[checkpoint.kind](checkpoint)
    if checkpoint.kind == "hqsweep":
        tensors = {name: as_plain(value) for name, value in tensors.items() if not name.endswith(STATES)}
    config = _config(model)
    pieces = pieces_of(names, tensors.keys(), wanted.keys(), config)
    state, left = _all_joined(pieces, tensors, checkpoint), unused(pieces, tensors)
    if config is not None and _strange(state, wanted):
        state, left = _through_transformers(model, state, checkpoint), []
    missing = check_tensors(checkpoint, state, wanted, model)
    computed = [name for name in state if name not in wanted]
    values = {name: value for name, value in state.items() if name in wanted}
    write_moments, moments = load_moments(checkpoint, model, optimizer, pieces, values) if optimizer else (None, 0)
    model.load_state_dict({actual[name]: value for name, value in values.items()}, strict=False)
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
    """UserError where load_checkpoint would refuse the names, shapes or dtypes of a checkpoint. No tensor is read, and
    the model may be on the meta device. Names that only transformers knows, such as names of experts saved one by one,
    pass."""
    checkpoint.check()
    dtypes = {name: getattr(torch, dtype, torch.float32) for name, (_, dtype) in checkpoint.tensors.items()}
    tensors = {
        name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, (shape, _) in checkpoint.tensors.items()
    }
    wanted, config = own_state(model), _config(model)
    state = _all_joined(pieces_of(None, tensors.keys(), wanted.keys(), config), tensors, checkpoint)
    if config is None or not _strange(state, wanted) or state.keys().isdisjoint(wanted):
        check_tensors(checkpoint, state, wanted, model)
        return
    more = [name for name in state if name not in wanted and not name.endswith(COMPUTED)]
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    more = [name for name in more if not any(re.search(pattern, name) for pattern in ignored)]
    if more and state.keys() >= wanted.keys():  # nothing is left that they could be other names of
        refuse_strange(checkpoint, sorted(more), wanted)
    for name, value in state.items():
        if name in wanted and value.shape != wanted[name].shape:
            refuse_shape(checkpoint, name, tuple(value.shape), tuple(wanted[name].shape))


def _config(model: nn.Module) -> Any:
    """The config of a Hugging Face model; None for other models."""
    return getattr(model, "config", None) if hasattr(model, "from_pretrained") else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, DistributedDataParallel and DataParallel."""
    while isinstance(inner := getattr(model, COMPILED_FROM, None), nn.Module) or isinstance(model, PARALLEL):
        model = inner if isinstance(inner, nn.Module) else model.module
    return model


def as_plain(value: Tensor) -> Tensor:
    """A plain tensor itself; of a quantized one the float32 values."""
    return value.dequantize(torch.float32) if isinstance(value, HybridQuantizedTensor) else value.detach()


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint of the plain model holds, by name: all but states of delayed
    scaling."""
    leads = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, DelayedState))
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: value for name, value in held.items() if not (leads and name.startswith(leads))}


def _all_joined(pieces: Pieces, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a model, each joined from its piece; UserError for a checkpoint that lacks one."""
    try:
        return {name: joined(piece, tensors) for name, piece in pieces.items()}
    except KeyError as error:
        raise UserError(f"{checkpoint.path}: it lacks the tensor {error}") from None
    except RuntimeError as error:
        raise UserError(f"{checkpoint.path}: its tensors have not the shapes of the model ({error})") from None


def _strange(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether a state has names that are not in the model's state_dict; a Hugging Face model may be saved by other
    ones."""
    return any(name not in wanted and not name.endswith(COMPUTED) for name in state)


def _through_transformers(model: nn.Module, state: dict[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state_dict that transformers makes from saved names, such as names of experts saved one by one."""
    with quietly():
        loaded, told = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
        )
    if told["unexpected_keys"]:
        refuse_strange(checkpoint, sorted(told["unexpected_keys"]), loaded.state_dict())
    if told["mismatched_keys"]:
        name, theirs, ours = sorted(told["mismatched_keys"])[0]
        refuse_shape(checkpoint, name, tuple(theirs), tuple(ours))
    lacking = set(told["missing_keys"])
    return {name: value for name, value in loaded.state_dict().items() if name not in lacking}


COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", "freqs_cis", "rope.cache")
"""Ends of names that earlier versions of models saved, and that are computed."""


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
    """UserError unless the tensors are the model's. Returns the missing ones, each tied to another that is there."""
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


def save_model(model: nn.Module, path: str | os.PathLike[str], *, grid: bool = False) -> Path:
    """Write a model's weights, converted or not, and return their path.

    A model of Hugging Face becomes a folder that from_pretrained reads: its config.json beside safetensors, with names
    as transformers saves them. For any other model `path` is a file NAME.safetensors, or a folder for
    model.safetensors, with the names of its state_dict. Tied tensors are stored once, and the other names stand in the
    file's metadata. Quantized weights are written as the float32 numbers that they stand for.

    All ranks call it for a model that is sharded over ranks (DTensors); the first one writes the whole tensors.

    grid: write projected weights as the codes and scales of their grids, rowwise (see on_grids).

    The files are whole or absent. Raises UserError where the path exists already, and where grid has no projected
    weight to write, or one of a converted or sharded model.
    """
    path, model = Path(path), unwrapped(model)
    state = own_state(model)
    if any(map(is_spread, state.values())):
        if grid:
            raise UserError("save_model: grid=True takes a model whose weights are on one rank; gather them first")
        return _save_spread(model, state, path)
    values = _read_once(model, state, as_plain)
    if grid:
        return save_state(values | on_grids(model), path)
    if hasattr(model, "save_pretrained"):
        held = any(isinstance(value, HybridQuantizedTensor) for value in state.values())
        return save_pretrained(model, path, state=values if held else None)
    return save_state(values, path)


def on_grids(model: nn.Module) -> dict[str, HybridQuantizedTensor]:
    """Return the projected weights of a model's linears and experts by name, as codes and scales of their grids.

    They have the values that products read before the host quantizes them: masters are rounded to the module's dtype
    first. UserError for a model without projected weights, and for a converted one, whose dtype changes by call.
    """
    quantized = {}
    for name, module in model.named_modules():
        parts = getattr(module, PARTS, ())
        quantizers = [_projection(own) for own in (module, *parts)]
        if any(quantizers[1:]):
            raise UserError(f"{name}: the model was converted; grid=True takes a model of hqsweep's own modules")
        if quantizers[0] is None:
            continue
        for own, weight in module.named_parameters(recurse=False):
            if own.startswith("weight"):
                kind = GroupedTensor if weight.dim() == 3 else HybridQuantizedTensor
                options = {"source_dtype": module.dtype, "directions": ("rowwise",)}
                held = kind.quantize(as_plain(weight), quantizers[0], **options)
                quantized[clean_name(f"{name}.{own}" if name else own)] = held
    if not quantized:
        raise UserError("there is no projected weight, as in recipe.linear.weight='project(mxfp4) > mxfp8'")
    return quantized


def _projection(module: nn.Module) -> HybridQuantizer | None:
    """Return the quantizer of the grid of a module's weight, if it has one."""
    quantizer = getattr(getattr(module, "quantizers", None), "weight", None)
    return quantizer.on_grid if isinstance(quantizer, ProjectedQuantizer) else None


def _save_spread(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> Path:
    """Write every tensor whole; only the first rank keeps all of them."""
    first = rank_in() == 0

    def read(value: Tensor) -> Tensor | None:
        tensor = whole_tensor(spread_like(value, as_plain(local(value))))
        return tensor.detach().cpu() if first else None

    whole = _read_once(model, state, read)
    if hasattr(model, "save_pretrained"):
        return by_first(lambda: save_pretrained(model, path, state=whole))
    return by_first(lambda: save_state(whole, path))


def _read_once(
    model: nn.Module, state: Mapping[str, Tensor], read: Callable[[Tensor], Tensor | None]
) -> dict[str, Tensor | None]:
    """Return `read` of the tensors of a state, by their names in the plain model. Tied names give one tensor, stored
    once."""
    params, known, values = dict(model.named_parameters(remove_duplicate=False)), {}, {}
    for name, value in state.items():
        own = params.get(name)
        if own not in known or own is None:
            known[own] = read(value)
        values[clean_name(name)] = known[own]
    return values


def save_pretrained(
    model: nn.Module,
    folder: Path,
    beside: Mapping[str, bytes] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """A Hugging Face model as a folder. beside: other files by name, such as the tokenizer's. state: tensors by name,
    where the model has only parts of them."""
    with _whole(folder) as partial, quietly():
        model.save_pretrained(partial, **({} if state is None else {"state_dict": dict(state)}))
        for name, content in (beside or {}).items():
            (partial / name).write_bytes(content)
    return folder


def save_state(state: Mapping[str, Tensor], path: Path) -> Path:
    """Plain tensors by name as a file of safetensors."""
    if path.suffix == ".safetensors":
        if path.exists():
            raise UserError(f"'{path}' is there already; give another name, or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_safetensors(state, path)
        return path
    with _whole(path) as partial:
        save_safetensors(state, partial / WEIGHTS)
    return path / WEIGHTS


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its final name after it is written. UserError if that name has content."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"'{folder}' is there already; give a folder that is new or empty")
    partial = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
