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
from hqsweep.parallel.wire.collectives import by_first, rank_in
from hqsweep.parallel.wire.local import is_spread, local, spread_like, whole_tensor
from hqsweep.quant.serialize import save_safetensors
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.recipe.roles import clean_name


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write a model's weights, converted or not, and return their path.

    A model of Hugging Face becomes a folder that from_pretrained reads: its config.json beside safetensors, with names
    as transformers saves them. For any other model `path` is a file NAME.safetensors, or a folder for
    model.safetensors, with the names of its state_dict. Tied tensors are stored once, and the other names stand in the
    file's metadata. Quantized weights are written as the float32 numbers that they stand for.

    All ranks call it for a model that is sharded over ranks (DTensors); the first one writes the whole tensors.

    The files are whole or absent. Raises UserError where the path exists already.
    """
    path, model = Path(path), unwrapped(model)
    state = own_state(model)
    if any(map(is_spread, state.values())):
        return _save_spread(model, state, path)
    values = _read_once(model, state, as_plain)
    if hasattr(model, "save_pretrained"):
        held = any(isinstance(value, HybridQuantizedTensor) for value in state.values())
        return save_pretrained(model, path, state=values if held else None)
    return save_state(values, path)


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
