"""Files of torch.save: a state_dict, bare or as training scripts wrap it; tensors are mapped, not read.

Files are read by torch's weights_only unpickler, which builds tensors and plain containers, and calls nothing else.
torch's warnings, and its advice on how to run the rest, are not shown.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hqsweep.checkpoints.checkpoint import Checkpoint, Kind, Optimizer, step_in_name
from hqsweep.errors import UserError
from hqsweep.recipe.roles import clean_name

NO_SUCH = "it is no file of torch.save with tensors and plain containers alone; save the state_dict of the model"


def load(file: Path | IO[bytes], *, device: Any = "cpu", mmap: bool = False) -> Any:
    """The content of a file of torch.save. Raises OSError, and Refused for every other error of torch."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(file, map_location=device, weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception as error:  # foreign bytes make torch.load raise anything
        raise Refused(_why(error)) from None


class Refused(ValueError):
    """Why torch does not load a file, in a sentence without the file's name."""


def _why(error: Exception) -> str:
    """The reason that torch gave, in a sentence of ours where it is one of the usual four."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "GLOBAL " in text:
        needed = text.split("GLOBAL ", 1)[1].split(" ")[0]
        return f"it holds an object of Python, {needed}, which is not loaded; save the state_dict of the model alone"
    if "TorchScript" in text:
        return "it is a TorchScript archive; save the state_dict of the model"
    if "central directory" in text or "PytorchStreamReader" in text or isinstance(error, EOFError):
        return "it is cut short, or no file of torch.save; copy it again"
    if "weights_only" in text or "Weights only" in text or "safe_globals" in text:  # it says how to run refused code
        return NO_SUCH
    return f"torch cannot load it ({text[:200]})"


MODELS = ("model", "state_dict", "module", "model_state_dict", "model_state", "network", "weights")
OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states", "optimizer_state")
STEPS = ("step", "global_step", "iter_num", "iteration", "iter")
OURS = {"loss_sum", "loss_count", "trunk", "optimizer", "model", "step"}
"""The keys in the state of hqsweep's runs."""


def inspect_file(path: Path) -> Checkpoint:
    """The description of a file of torch.save. A refusal by torch is its problem."""
    tensors, saved_as, step, kind, optimizer, problems = {}, {}, None, "torch", "none", []
    try:
        document = read_file(path)
        weights, step = state_dict(document, path), _step(document, path)
    except UserError as error:
        problems = [str(error).removeprefix(f"{path}: ")]
    else:
        for name, tensor in weights.items():
            tensors[clean_name(name)] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            saved_as[clean_name(name)] = name
        kind, optimizer = _kind(document), _optimizer(document)
    return Checkpoint(
        path=path,
        kind=kind,
        step=step,
        tensors=tensors,
        optimizer=optimizer,
        problems=tuple(problems),
        files=(path,),
        saved_as=saved_as,
    )


def inspect_files(folder: Path, files: Sequence[Path]) -> Checkpoint:
    """Return the description of a folder with several such files, each with a part of the weights."""
    parts = [inspect_file(file) for file in files]
    return Checkpoint(
        path=folder,
        kind="torch",
        step=parts[0].step,
        tensors={name: described for part in parts for name, described in part.tensors.items()},
        problems=tuple(f"{part.path.name}: {problem}" for part in parts for problem in part.problems),
        files=tuple(files),
        saved_as={name: saved for part in parts for name, saved in part.saved_as.items()},
        weights=tuple(files),
    )


def read_file(path: Path) -> Any:
    """The content of a file of torch.save, its tensors mapped from the file. UserError for another file, or one that
    needs more than tensors and plain containers."""
    try:
        try:
            return load(path, mmap=True)
        except Refused as refused:
            if "mmap can only be used" not in str(refused):
                raise
            return load(path)  # the format before torch 1.6
    except Refused as refused:
        raise UserError(f"{path}: {refused}") from None


def state_dict(document: Any, path: Path) -> dict[str, Any]:
    """The tensors of the model in a document, by their names there. UserError where there are none."""
    from torch import Tensor

    wrapped = document
    if isinstance(document, Mapping):
        for key in MODELS:
            if isinstance(document.get(key), Mapping):
                wrapped = document[key]
                break
    if isinstance(wrapped, Mapping):
        tensors = {
            name: value for name, value in wrapped.items() if isinstance(name, str) and isinstance(value, Tensor)
        }
        if tensors:
            return tensors
    there = (
        f"keys {', '.join(map(str, list(document)[:5]))}" if isinstance(document, Mapping) else type(document).__name__
    )
    raise UserError(f"{path}: it holds no state_dict ({there}); save one, bare or under 'model'")


def optimizer_state(document: Any) -> Mapping[str, Any] | None:
    """The state_dict of the first optimizer in a document."""
    if not isinstance(document, Mapping):
        return None
    for key in OPTIMIZERS:
        state = document.get(key)
        if isinstance(state, list) and len(state) == 1:
            state = state[0]
        if isinstance(state, Mapping) and isinstance(state.get("state"), Mapping) and state["state"]:
            return state
    return None


def _optimizer(document: Any) -> Optimizer:
    state = optimizer_state(document)
    if state is None:
        return "none"
    named = all(isinstance(key, str) for key in state["state"]) or any(
        "param_names" in group for group in state.get("param_groups", ()) if isinstance(group, Mapping)
    )
    return "named" if named else "indexed"


def _kind(document: Any) -> Kind:
    return "hqsweep" if isinstance(document, Mapping) and document.keys() >= OURS else "torch"


def _step(document: Any, path: Path) -> int | None:
    if isinstance(document, Mapping):
        for key in STEPS:
            value = document.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return step_in_name(path)


def read(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tensors of a checkpoint, mapped from its files, by their clean names."""
    tensors = {}
    for file in checkpoint.weights or (checkpoint.path,):
        tensors |= {clean_name(name): tensor for name, tensor in state_dict(read_file(file), file).items()}
    return tensors
