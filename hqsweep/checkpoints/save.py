"""save_model: weights under the plain model's own names, as other programs read them."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from hqsweep.checkpoints.foreign.huggingface import WEIGHTS
from hqsweep.checkpoints.foreign.load import as_plain, own_state, unwrapped
from hqsweep.errors import UserError
from hqsweep.models.hf_folder import quietly
from hqsweep.nn.core.module import PARTS
from hqsweep.parallel.wire.collectives import by_first, rank_in
from hqsweep.parallel.wire.local import is_spread, local, spread_like, whole_tensor
from hqsweep.quant.grouped import GroupedTensor
from hqsweep.quant.hybrid import HybridQuantizer, ProjectedQuantizer
from hqsweep.quant.serialize import save_safetensors
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import clean_name


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
    first. UserError for a model without projected weights, and for a converted one, whose dtype is that of each call.
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
